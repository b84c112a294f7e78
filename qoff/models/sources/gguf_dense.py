"""Fields of the `config.json` of architectures of GGUF without experts."""

from __future__ import annotations

from qoff.errors import UnsupportedModelError

from .gguf_fields import (
    Config,
    attention_bias,
    dense,
    has_bias,
    rms,
    scaled_queries,
    scales,
    two_ropes,
    windows,
)
from .gguf_metadata import Metadata


def llama(metadata: Metadata, config: Config) -> Config:
    return {**dense(metadata), "mlp_bias": has_bias(metadata, "ffn_up")}


def mistral3(metadata: Metadata, config: Config) -> Config:
    """Ministral 3: YaRN, whose `mscale` is 1, and queries scaled by position."""
    metadata.only("expert_count", 0)
    rope = config["rope_parameters"] | scaled_queries(metadata, config["max_position_embeddings"])
    multiplier = metadata.get("rope.scaling.yarn_log_multiplier", 0.0)
    if rope["rope_type"] == "yarn" and multiplier:
        rope |= {"mscale": 1.0, "mscale_all_dim": multiplier}
    return {**rms(metadata), "sliding_window": None, "rope_parameters": rope}


def qwen(metadata: Metadata, config: Config) -> Config:
    """Qwen, Olmo 2, and Hunyuan, whose RoPE is stored with its stretched base."""
    return dense(metadata)


def qwen1(metadata: Metadata, config: Config) -> Config:
    """Qwen 1, whose files count the rows of gate and up together."""
    return {**dense(metadata), "intermediate_size": config["intermediate_size"] // 2}


def granite(metadata: Metadata, config: Config) -> Config:
    return {**llama(metadata, config), **scales(metadata, config)}


def minicpm(metadata: Metadata, config: Config) -> Config:
    """MiniCPM 1, 2 and 4; old files do not have its factors."""
    for key in ("embedding_scale", "residual_scale"):
        metadata.need(key)
    return granite(metadata, config)


def olmo3(metadata: Metadata, config: Config) -> Config:
    """Olmo 2 with windows; YaRN is that of the layers without one."""
    rope = config["rope_parameters"]
    return {
        **dense(metadata),
        **windows(metadata, metadata.layers, 4, 0),
        "rope_parameters": two_ropes(metadata, rope, rope["rope_theta"]),
    }


def phi3(metadata: Metadata, config: Config) -> Config:
    """transformers wants original_max_position_embeddings beside `rope_parameters`, too."""
    rope = config["rope_parameters"]
    original = rope.get("original_max_position_embeddings", config["max_position_embeddings"])
    return {
        **dense(metadata),
        "sliding_window": metadata.get("attention.sliding_window") or None,
        "original_max_position_embeddings": original,
    }


def glm(metadata: Metadata, config: Config) -> Config:
    if any(metadata.get("rope.dimension_sections", ())):
        raise UnsupportedModelError(
            f"{metadata.path}: {metadata.architecture}.rope.dimension_sections says that positions "
            "have several dimensions; supported: one"
        )
    return dense(metadata)


def gemma(metadata: Metadata, config: Config) -> Config:
    """Norms are stored whole, so that 1 is not added to them again."""
    return {**dense(metadata), "hidden_activation": "gelu_pytorch_tanh"}


def gemma2(metadata: Metadata, config: Config) -> Config:
    return {
        **gemma(metadata, config),
        **windows(metadata, metadata.layers, 2, 4096),
        "query_pre_attn_scalar": _query_scalar(config, 46),
        "attn_logit_softcapping": metadata.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.get("final_logit_softcapping", 30.0),
    }


def gemma3(metadata: Metadata, config: Config) -> Config:
    """Scaling is that of the layers without a window."""
    return {
        **gemma(metadata, config),
        **windows(metadata, metadata.layers, 6, 0),
        "query_pre_attn_scalar": _query_scalar(config, 62),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": metadata.get("final_logit_softcapping") or None,
        "rope_parameters": two_ropes(metadata, config["rope_parameters"]),
    }


def _query_scalar(config: Config, largest: int) -> int:
    """Queries are scaled by its root: the size of a head, but for the models of 27 billion.

    Files do not have it; llama.cpp knows these by the number of their layers, too.
    """
    if config["num_hidden_layers"] == largest:
        return int(config["hidden_size"] // config["num_attention_heads"])
    return int(config["head_dim"])


def gpt_neox(metadata: Metadata, config: Config) -> Config:
    """llama.cpp computes GELU by its approximation; what a file has of it is not known."""
    return {
        "layer_norm_eps": metadata.need("attention.layer_norm_epsilon"),
        "use_parallel_residual": metadata.get("use_parallel_residual", True),
        "attention_bias": attention_bias(metadata),
    }


def jais2(metadata: Metadata, config: Config) -> Config:
    return {
        "layer_norm_eps": metadata.need("attention.layer_norm_epsilon"),
        "attention_bias": attention_bias(metadata),
        "mlp_bias": has_bias(metadata, "ffn_up"),
    }


def nemotron(metadata: Metadata, config: Config) -> Config:
    """Norms are stored whole, so that 1 is not added to them again."""
    return {
        "norm_eps": metadata.need("attention.layer_norm_epsilon"),
        "attention_bias": attention_bias(metadata),
        "mlp_bias": has_bias(metadata, "ffn_up"),
    }


def starcoder2(metadata: Metadata, config: Config) -> Config:
    """Files do not have the sliding window, and llama.cpp has none."""
    return {
        "norm_epsilon": metadata.need("attention.layer_norm_epsilon"),
        "use_bias": has_bias(metadata, "ffn_up"),
        "sliding_window": metadata.get("attention.sliding_window") or None,
    }


def cohere(metadata: Metadata, config: Config) -> Config:
    return {**_cohere(metadata), "use_qk_norm": metadata.has("blk.0.attn_q_norm.weight")}


def cohere2(metadata: Metadata, config: Config) -> Config:
    """Three layers in four have the window, which no key says."""
    return {**_cohere(metadata), **windows(metadata, metadata.layers, 4, 4096)}


def _cohere(metadata: Metadata) -> Config:
    return {
        "layer_norm_eps": metadata.need("attention.layer_norm_epsilon"),
        "logit_scale": metadata.need("logit_scale"),
        "attention_bias": attention_bias(metadata),
    }


def exaone4(metadata: Metadata, config: Config) -> Config:
    """Only the 32B has windows, in three layers of four; llama.cpp knows it by its 64 layers."""
    found = windows(metadata, metadata.layers, 4, 4096 if config["num_hidden_layers"] == 64 else 0)
    return {**dense(metadata), "sliding_window": None, **found}


def seed_oss(metadata: Metadata, config: Config) -> Config:
    out = has_bias(metadata, "attn_output")
    return {**dense(metadata), "attention_out_bias": out, "mlp_bias": has_bias(metadata, "ffn_up")}


def ernie4_5(metadata: Metadata, config: Config) -> Config:
    return {**rms(metadata), "use_bias": attention_bias(metadata)}
