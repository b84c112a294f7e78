"""Fields of the `config.json` of architectures of GGUF with experts."""

from __future__ import annotations

from qoff.errors import FormatError

from .gguf_fields import Config, attention_bias, rms, scales, windows
from .gguf_metadata import Metadata

_INNER = "expert_feed_forward_length"
_LLAMA4_CHUNK = 8192  # tokens
SOFTMAX, SIGMOID = (0, 1), (0, 2)  # of `expert_gating_func`


def mixtral(metadata: Metadata, config: Config) -> Config:
    return {**rms(metadata), **mixture(metadata, "num_local_experts"), "sliding_window": None}


def phimoe(metadata: Metadata, config: Config) -> Config:
    """Keys say nothing of its SparseMixer, in whose place llama.cpp has a softmax."""
    rope = config["rope_parameters"]
    if rope["rope_type"] == "longrope":
        scale = rope.pop("attention_factor", 1.0)
        rope |= {"short_mscale": scale, "long_mscale": scale}
    return {
        **mixtral(metadata, config),
        "sliding_window": metadata.get("attention.sliding_window") or None,
        "attention_bias": attention_bias(metadata),
        "lm_head_bias": metadata.has("output.bias"),
    }


def olmoe(metadata: Metadata, config: Config) -> Config:
    metadata.only("expert_weights_norm", False)
    return {
        **rms(metadata),
        **mixture(metadata, "num_experts"),
        "intermediate_size": metadata.get(_INNER, config["intermediate_size"]),
        "norm_topk_prob": False,
    }


def granite_moe(metadata: Metadata, config: Config) -> Config:
    return {
        **rms(metadata),
        **mixture(metadata, "num_local_experts"),
        **scales(metadata, config),
        "attention_bias": attention_bias(metadata),
    }


def granite_moe_shared(metadata: Metadata, config: Config) -> Config:
    """A family of its own in transformers; in a file one key more says so."""
    shared = metadata.need("expert_shared_feed_forward_length")
    return {**granite_moe(metadata, config), "shared_intermediate_size": shared}


def afmoe(metadata: Metadata, config: Config) -> Config:
    """Trinity: llama.cpp scales the embedding always, and rotates in layers with the window."""
    _check_window(metadata)
    metadata.only("expert_weights_norm", True)
    found = deepseek(metadata)
    return {
        "rms_norm_eps": found["rms_norm_eps"],
        "attention_bias": found["attention_bias"],
        "num_experts": found["n_routed_experts"],
        "num_experts_per_tok": found["num_experts_per_tok"],
        "num_shared_experts": found["n_shared_experts"],
        "num_dense_layers": found["first_k_dense_replace"],
        "moe_intermediate_size": found["moe_intermediate_size"],
        "route_scale": found["routed_scaling_factor"],
        "mup_enabled": True,
        **windows(metadata, metadata.layers, 4, 0),
    }


def glm4_moe(metadata: Metadata, config: Config) -> Config:
    return {
        **deepseek(metadata),
        "use_qk_norm": metadata.has("blk.0.attn_q_norm.weight"),
    }


def dots1(metadata: Metadata, config: Config) -> Config:
    return {**deepseek(metadata), "sliding_window": None}


def exaone_moe(metadata: Metadata, config: Config) -> Config:
    """Layers with the window have RoPE, others have none."""
    _check_window(metadata)
    found = {**deepseek(metadata), **groups(metadata)}
    return {
        "num_experts": found.pop("n_routed_experts"),
        "num_shared_experts": found.pop("n_shared_experts"),
        **found,
        **windows(metadata, metadata.layers, 4, 0),
    }


def _check_window(metadata: Metadata) -> None:
    """Raise UnsupportedModelError for a file without a sliding window."""
    if not metadata.need("attention.sliding_window"):
        metadata.only("attention.sliding_window", "1 or more")


def minimax_m2(metadata: Metadata, config: Config) -> Config:
    return {
        **rms(metadata),
        **mixture(metadata, "num_local_experts", SIGMOID),
        "intermediate_size": metadata.get(_INNER, config["intermediate_size"]),
    }


def ernie4_5_moe(metadata: Metadata, config: Config) -> Config:
    """A file says with which layer experts begin, and in every which they are."""
    found = mixture(metadata, "moe_num_experts")
    return {
        **rms(metadata),
        "moe_num_experts": found["moe_num_experts"],
        "moe_k": found["num_experts_per_tok"],
        "moe_intermediate_size": metadata.need(_INNER),
        "moe_num_shared_experts": _shared(metadata),
        "moe_layer_interval": metadata.get("interleave_moe_layer_step", 1),
        "moe_layer_start_index": metadata.get("leading_dense_block_count", 0),
        "use_bias": attention_bias(metadata),
    }


def deepseek(metadata: Metadata, gating: tuple[int, ...] = SIGMOID) -> Config:
    """What the keys say of experts that are chosen as DeepSeek V3 does, in one group."""
    return {
        **rms(metadata),
        **mixture(metadata, "n_routed_experts", gating, scaled=True),
        "first_k_dense_replace": metadata.get("leading_dense_block_count", 0),
        "attention_bias": attention_bias(metadata),
        "moe_intermediate_size": metadata.need(_INNER),
        "n_shared_experts": _shared(metadata),
        "norm_topk_prob": metadata.get("expert_weights_norm", False),
        "routed_scaling_factor": float(metadata.get("expert_weights_scale") or 1.0),
        "n_group": 1,
        "topk_group": 1,
    }


def groups(metadata: Metadata) -> Config:
    """How many groups of experts there are, and how many of them a token chooses from."""
    count = metadata.get("expert_group_count", 0) or 1
    return {"n_group": count, "topk_group": metadata.get("expert_group_used_count", 0) or 1}


def _shared(metadata: Metadata) -> int:
    """How many experts all tokens have: they are one MLP of so many times their inner size."""
    names = (name for name in sorted(metadata.tensors) if name.endswith(".ffn_up_shexp.weight"))
    first = next(names, None)
    rows, inner = 0 if first is None else metadata.shape(first)[0], int(metadata.need(_INNER))
    if rows % inner:
        raise FormatError(
            f"{metadata.path}: tensor {first} has {rows} rows; expected a multiple of "
            f"{metadata.architecture}.{_INNER}, which is {inner}"
        )
    return rows // inner


def mixture(
    metadata: Metadata, count: str, gating: tuple[int, ...] = SOFTMAX, scaled: bool = False
) -> Config:
    """How many experts there are and how many of them compute; count: the name in the config.

    gating: what llama.cpp calls what becomes of the router's scores, and 0 where a file says
    nothing. scaled: weights may have a factor.
    """
    metadata.only("expert_gating_func", *gating)
    if not scaled:
        metadata.only("expert_weights_scale", 0.0, 1.0)
    experts, used = metadata.need("expert_count"), metadata.need("expert_used_count")
    if not 1 <= used <= experts:
        raise FormatError(
            f"{metadata.path}: {metadata.architecture}.expert_used_count is {used} of {experts} "
            "experts"
        )
    return {count: experts, "num_experts_per_tok": used}


def _qwen_moe(metadata: Metadata, config: Config, normalized: bool) -> Config:
    experts = mixture(metadata, "num_experts")
    each = config["intermediate_size"] // experts["num_experts_per_tok"]
    layers = range(config["num_hidden_layers"])
    return {
        **rms(metadata),
        **experts,
        "moe_intermediate_size": metadata.get(_INNER, each),
        "norm_topk_prob": metadata.get("expert_weights_norm", normalized),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i in layers if not metadata.has(f"blk.{i}.ffn_gate_inp.weight")],
    }


def qwen2_moe(metadata: Metadata, config: Config) -> Config:
    shared = metadata.get("expert_shared_feed_forward_length", config["intermediate_size"])
    return {
        **_qwen_moe(metadata, config, normalized=False),
        "shared_expert_intermediate_size": shared,
        "qkv_bias": attention_bias(metadata),
    }


def qwen3_moe(metadata: Metadata, config: Config) -> Config:
    found = _qwen_moe(metadata, config, normalized=True)
    return {**found, "attention_bias": attention_bias(metadata)}


def llama4(metadata: Metadata, config: Config) -> Config:
    """Chunks, layers without RoPE, factors of queries and norms are as llama.cpp has them.

    That knows the model without norms, Maverick, by its 128 experts.
    """
    metadata.only("attention.sliding_window", _LLAMA4_CHUNK)
    experts = mixture(metadata, "num_local_experts", SIGMOID)
    layers = range(config["num_hidden_layers"])
    return {
        **rms(metadata),
        **experts,
        "intermediate_size": metadata.need(_INNER),
        "intermediate_size_mlp": config["intermediate_size"],
        "moe_layers": [i for i in layers if metadata.has(f"blk.{i}.ffn_gate_inp.weight")],
        "attention_chunk_size": _LLAMA4_CHUNK,
        "no_rope_layer_interval": 4,
        "attn_temperature_tuning": True,
        "attn_scale": 0.1,
        "floor_scale": _LLAMA4_CHUNK,
        "use_qk_norm": experts["num_local_experts"] != 128,
        "attention_bias": attention_bias(metadata),
    }


def hunyuan_moe(metadata: Metadata, config: Config) -> Config:
    """Experts, and that for all tokens, are as large as an MLP would be."""
    experts, inner = mixture(metadata, "num_experts"), config["intermediate_size"]
    metadata.only(_INNER, inner)
    metadata.only("expert_shared_feed_forward_length", inner)
    return {
        **rms(metadata),
        "num_experts": experts["num_experts"],
        "moe_topk": experts["num_experts_per_tok"],
        "attention_bias": attention_bias(metadata),
    }


def gpt_oss(metadata: Metadata, config: Config) -> Config:
    """Its YaRN does not round the channels between which it changes, which no key says."""
    rope = config["rope_parameters"]
    yarn = {"truncate": False} if rope["rope_type"] == "yarn" else {}
    return {
        **rms(metadata),
        **mixture(metadata, "num_local_experts"),
        **windows(metadata, metadata.layers, 2, 128),
        "intermediate_size": metadata.need(_INNER),
        "attention_bias": attention_bias(metadata),
        "rope_parameters": rope | yarn,
    }
