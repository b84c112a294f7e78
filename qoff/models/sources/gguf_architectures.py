"""What becomes of each architecture of GGUF: a `config.json`, and the names of its tensors.

Facts are from llama.cpp: `conversion/*.py` (what is written), `gguf-py/gguf/tensor_mapping.py` and
`src/models/*.cpp` (what is read, and defaults of keys that old files do not have). What the keys do
not say has the value of transformers' config class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from qoff.errors import FormatError, UnsupportedModelError
from qoff.models.families.family import TensorNames

from .gguf_metadata import EMBEDDING, HEAD, Metadata
from .gguf_rope import rope_parameters

Config = dict[str, Any]
_SLIDING, _FULL = "sliding_attention", "full_attention"
_MODULES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn": "attn_sinks",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.post_norm": "post_attention_norm",
    "mlp.post_norm": "post_ffw_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.router": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.experts": "experts",  # one by one
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.gate_up_proj": "ffn_gate_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}


@dataclass(frozen=True)
class Architecture:
    """One value of `general.architecture`.

    fields: of its config, what is not common. rope_pairs: neighbouring rows of queries and keys
    turn together (llama.cpp permutes those of Llama when it converts). fused_gate_up: `ffn_up` has
    the rows of the gate, too. modules: its own names of modules.
    """

    model_type: str
    model: str  # transformers' class
    fields: Callable[[Metadata, Config], Config]
    rope_pairs: bool = False
    fused_gate_up: bool = False
    modules: Mapping[str, str] | None = None

    def config(self, metadata: Metadata) -> Config:
        """The `config.json`. Raises FormatError or UnsupportedModelError."""
        config = {**_common(metadata), "model_type": self.model_type, "architectures": [self.model]}
        return {**config, **self.fields(metadata, config)}

    def names(self, metadata: Metadata) -> TensorNames:
        """What the tensors of a file are called. They are fused or not as its first layer's are."""
        return TensorNames(
            layer="blk.{}.",
            modules={**_MODULES, **(self.modules or {})},
            embedding=EMBEDDING,
            norm="output_norm",
            head=HEAD,
            fused_qkv="rows" if metadata.has("blk.0.attn_qkv.weight") else "",
            fused_gate_up=self.fused_gate_up,
            stacked_experts=_stacked(metadata),
            rope_pairs=self.rope_pairs,
        )


def find(metadata: Metadata) -> Architecture:
    """That of a file whose `general.architecture` is one of `ARCHITECTURES`."""
    if metadata.architecture == "llama" and metadata.get("expert_count", 0):
        return _MIXTRAL
    return ARCHITECTURES[metadata.architecture]


def _common(metadata: Metadata) -> Config:
    hidden, heads = metadata.need("embedding_length"), metadata.need("attention.head_count")
    head_dim = metadata.get("attention.key_length", hidden // heads)
    metadata.only("attention.value_length", head_dim)
    return {
        "hidden_size": hidden,
        "intermediate_size": metadata.need("feed_forward_length"),
        "num_hidden_layers": metadata.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": metadata.need("context_length"),
        "vocab_size": metadata.shape(EMBEDDING)[0],
        "rope_parameters": rope_parameters(metadata, head_dim, metadata.architecture in _PARTIAL),
        "tie_word_embeddings": not metadata.has(HEAD),
        "bos_token_id": metadata.token("bos"),
        "eos_token_id": metadata.token("eos"),
        "pad_token_id": metadata.token("padding"),
    }


def _dense(metadata: Metadata) -> Config:
    """RMSNorm, no experts; biases of attention where there are some."""
    metadata.only("expert_count", 0)
    return {**_rms(metadata), "attention_bias": _has_bias(metadata, "attn_q", "attn_qkv")}


def _rms(metadata: Metadata) -> Config:
    return {"rms_norm_eps": metadata.need("attention.layer_norm_rms_epsilon")}


def _has_bias(metadata: Metadata, *modules: str) -> bool:
    return any(metadata.has(f"blk.0.{module}.bias") for module in modules)


def _llama(metadata: Metadata, config: Config) -> Config:
    return {**_dense(metadata), "mlp_bias": _has_bias(metadata, "ffn_up")}


def _mixtral(metadata: Metadata, config: Config) -> Config:
    return {**_rms(metadata), **_experts(metadata, "num_local_experts"), "sliding_window": None}


def _qwen(metadata: Metadata, config: Config) -> Config:
    return _dense(metadata)


def _granite(metadata: Metadata, config: Config) -> Config:
    """A scale of 0 or none is none."""
    metadata.only("rope.scaling.finetuned", True)
    return {
        **_llama(metadata, config),
        "embedding_multiplier": float(metadata.get("embedding_scale") or 1.0),
        "residual_multiplier": float(metadata.get("residual_scale") or 1.0),
        "attention_multiplier": float(
            metadata.get("attention.scale") or config["head_dim"] ** -0.5
        ),
        "logits_scaling": float(metadata.need("logit_scale")),
    }


def _olmo2(metadata: Metadata, config: Config) -> Config:
    metadata.only("attention.sliding_window", 0)  # of Olmo 3
    return _dense(metadata)


def _phi3(metadata: Metadata, config: Config) -> Config:
    """transformers wants original_max_position_embeddings beside `rope_parameters`, too."""
    rope = config["rope_parameters"]
    original = rope.get("original_max_position_embeddings", config["max_position_embeddings"])
    return {
        **_dense(metadata),
        "sliding_window": metadata.get("attention.sliding_window") or None,
        "original_max_position_embeddings": original,
    }


def _glm(metadata: Metadata, config: Config) -> Config:
    if any(metadata.get("rope.dimension_sections", ())):
        raise UnsupportedModelError(
            f"{metadata.path}: {metadata.architecture}.rope.dimension_sections says that positions "
            "have several dimensions; supported: one"
        )
    return _dense(metadata)


def _gemma(metadata: Metadata, config: Config) -> Config:
    """Norms are stored whole, so that 1 is not added to them again."""
    return {**_dense(metadata), "hidden_activation": "gelu_pytorch_tanh"}


def _gemma2(metadata: Metadata, config: Config) -> Config:
    return {
        **_gemma(metadata, config),
        **_windows(metadata, config, 2, 4096),
        "query_pre_attn_scalar": _query_scalar(config, 46),
        "attn_logit_softcapping": metadata.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.get("final_logit_softcapping", 30.0),
    }


def _gemma3(metadata: Metadata, config: Config) -> Config:
    """Scaling is that of the layers without a window."""
    local = float(metadata.get("rope.freq_base_swa", 10000.0))
    return {
        **_gemma(metadata, config),
        **_windows(metadata, config, 6, 0),
        "query_pre_attn_scalar": _query_scalar(config, 62),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": metadata.get("final_logit_softcapping") or None,
        "rope_parameters": {
            _FULL: config["rope_parameters"],
            _SLIDING: {"rope_type": "default", "rope_theta": local},
        },
    }


def _query_scalar(config: Config, largest: int) -> int:
    """Queries are scaled by its root: the size of a head, but for the models of 27 billion.

    Files do not have it; llama.cpp knows these by the number of their layers, too.
    """
    if config["num_hidden_layers"] == largest:
        return int(config["hidden_size"] // config["num_attention_heads"])
    return int(config["head_dim"])


def _windows(metadata: Metadata, config: Config, period: int, default: int) -> Config:
    """The sliding window, and in which layers it is: by their pattern, in all but every n-th."""
    layers = config["num_hidden_layers"]
    window = metadata.get("attention.sliding_window", default)
    pattern = metadata.get("attention.sliding_window_pattern", period)
    if not isinstance(pattern, int):
        if len(pattern) != layers:
            raise FormatError(
                f"{metadata.path}: {metadata.architecture}.attention.sliding_window_pattern has "
                f"{len(pattern)} entries for {layers} layers"
            )
        slides = [bool(x) for x in pattern]
    else:
        slides = [pattern == 0 or i % pattern < pattern - 1 for i in range(layers)]
    kinds = [_SLIDING if window and slide else _FULL for slide in slides]
    return {"layer_types": kinds, **({"sliding_window": window} if window else {})}


def _gpt_neox(metadata: Metadata, config: Config) -> Config:
    """llama.cpp computes GELU by its approximation; what a file has of it is not known."""
    return {
        "layer_norm_eps": metadata.need("attention.layer_norm_epsilon"),
        "use_parallel_residual": metadata.get("use_parallel_residual", True),
        "attention_bias": _has_bias(metadata, "attn_qkv", "attn_q"),
    }


def _starcoder2(metadata: Metadata, config: Config) -> Config:
    """Files do not have the sliding window, and llama.cpp has none."""
    return {
        "norm_epsilon": metadata.need("attention.layer_norm_epsilon"),
        "use_bias": _has_bias(metadata, "ffn_up"),
        "sliding_window": metadata.get("attention.sliding_window") or None,
    }


def _cohere(metadata: Metadata, config: Config) -> Config:
    return {
        "layer_norm_eps": metadata.need("attention.layer_norm_epsilon"),
        "logit_scale": metadata.need("logit_scale"),
        "attention_bias": _has_bias(metadata, "attn_q"),
        "use_qk_norm": metadata.has("blk.0.attn_q_norm.weight"),
    }


def _stacked(metadata: Metadata) -> Any:
    """How experts lie in the first layer that has them."""
    names = metadata.tensors
    if any(name.endswith(".ffn_gate_up_exps.weight") for name in names):
        return "halves"
    return "rows" if any(name.endswith(".ffn_up_exps.weight") for name in names) else ""


def _experts(metadata: Metadata, count: str) -> Config:
    """How many experts there are and how many of them compute; count: the name in the config."""
    metadata.only("expert_gating_func", 0, 1)  # softmax
    experts, used = metadata.need("expert_count"), metadata.need("expert_used_count")
    if not 1 <= used <= experts:
        raise FormatError(
            f"{metadata.path}: {metadata.architecture}.expert_used_count is {used} of {experts} "
            "experts"
        )
    return {count: experts, "num_experts_per_tok": used}


def _qwen_moe(metadata: Metadata, config: Config, normalized: bool) -> Config:
    experts = _experts(metadata, "num_experts")
    each = config["intermediate_size"] // experts["num_experts_per_tok"]
    layers = range(config["num_hidden_layers"])
    return {
        **_rms(metadata),
        **experts,
        "moe_intermediate_size": metadata.get("expert_feed_forward_length", each),
        "norm_topk_prob": metadata.get("expert_weights_norm", normalized),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i in layers if not metadata.has(f"blk.{i}.ffn_gate_inp.weight")],
    }


def _qwen2_moe(metadata: Metadata, config: Config) -> Config:
    shared = metadata.get("expert_shared_feed_forward_length", config["intermediate_size"])
    return {
        **_qwen_moe(metadata, config, normalized=False),
        "shared_expert_intermediate_size": shared,
        "qkv_bias": _has_bias(metadata, "attn_q", "attn_qkv"),
    }


def _qwen3_moe(metadata: Metadata, config: Config) -> Config:
    bias = _has_bias(metadata, "attn_q", "attn_qkv")
    return {**_qwen_moe(metadata, config, normalized=True), "attention_bias": bias}


def _gpt_oss(metadata: Metadata, config: Config) -> Config:
    """Its YaRN does not round the channels between which it changes, which no key says."""
    rope = config["rope_parameters"]
    yarn = {"truncate": False} if rope["rope_type"] == "yarn" else {}
    return {
        **_rms(metadata),
        **_experts(metadata, "num_local_experts"),
        **_windows(metadata, config, 2, 128),
        "intermediate_size": metadata.need("expert_feed_forward_length"),
        "attention_bias": _has_bias(metadata, "attn_q", "attn_qkv"),
        "rope_parameters": rope | yarn,
    }


_MIXTRAL = Architecture("mixtral", "MixtralForCausalLM", _mixtral, rope_pairs=True)
ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", "LlamaForCausalLM", _llama, rope_pairs=True),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", _qwen),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", _qwen),
    "smollm3": Architecture("smollm3", "SmolLM3ForCausalLM", _llama, rope_pairs=True),
    "phi3": Architecture("phi3", "Phi3ForCausalLM", _phi3, fused_gate_up=True),
    "granite": Architecture("granite", "GraniteForCausalLM", _granite, rope_pairs=True),
    "olmo2": Architecture("olmo2", "Olmo2ForCausalLM", _olmo2),
    "chatglm": Architecture("glm", "GlmForCausalLM", _glm, rope_pairs=True, fused_gate_up=True),
    "glm4": Architecture("glm4", "Glm4ForCausalLM", _glm, rope_pairs=True, fused_gate_up=True),
    "gemma": Architecture("gemma", "GemmaForCausalLM", _gemma),
    "gemma2": Architecture("gemma2", "Gemma2ForCausalLM", _gemma2),
    "gemma3": Architecture("gemma3_text", "Gemma3ForCausalLM", _gemma3),
    "gptneox": Architecture("gpt_neox", "GPTNeoXForCausalLM", _gpt_neox),
    "command-r": Architecture(
        "cohere",
        "CohereForCausalLM",
        _cohere,
        rope_pairs=True,
        modules={"post_attention_layernorm": "attn_norm"},
    ),
    "starcoder2": Architecture("starcoder2", "Starcoder2ForCausalLM", _starcoder2),
    "qwen2moe": Architecture("qwen2_moe", "Qwen2MoeForCausalLM", _qwen2_moe),
    "qwen3moe": Architecture("qwen3_moe", "Qwen3MoeForCausalLM", _qwen3_moe),
    "gpt-oss": Architecture(
        "gpt_oss",
        "GptOssForCausalLM",
        _gpt_oss,
        modules={"post_attention_layernorm": "post_attention_norm"},
    ),
}
_PARTIAL = ("phi3", "chatglm", "glm4", "gptneox")  # turn a part of each head
