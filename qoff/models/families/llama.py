"""Llama and its descendants: RMSNorm, RoPE, a gated MLP."""

from __future__ import annotations

from typing import Any

from .family import (
    Family,
    Fields,
    TensorNames,
    biases,
    head_dim_of,
    one_window,
    positive,
    query_scale,
    rope_of,
    windows,
)


def _llama(config: Any) -> Fields:
    """Llama 1 to 3, and the many models that share its class."""
    return biases(config.attention_bias, config.mlp_bias)


def _mistral(config: Any) -> Fields:
    """Llama without biases; one sliding window for all layers."""
    return {"sliding_window": one_window(config)}


def _ministral3(config: Any) -> Fields:
    """Mistral whose queries are scaled by their positions."""
    scale, rope = query_scale(config)
    return {**_mistral(config), **scale, "rope": rope_of(config, rope, head_dim_of(config))}


def _ministral(config: Any) -> Fields:
    """Mistral with sliding windows layer by layer."""
    return {"sliding_window": windows(config)}


def _qwen2(config: Any) -> Fields:
    """Biases on queries, keys and values only; sliding windows layer by layer."""
    return {"qkv_bias": True, "sliding_window": windows(config)}


def _qwen3(config: Any) -> Fields:
    """Norms on query and key heads; sliding windows layer by layer."""
    return {
        **biases(config.attention_bias),
        "qk_norm": "head",
        "sliding_window": windows(config),
    }


def _smollm3(config: Any) -> Fields:
    """Llama with some layers that do not rotate."""
    rope_layers = tuple(bool(x) for x in config.no_rope_layers)
    return {
        **_llama(config),
        "rope_layers": rope_layers[: config.num_hidden_layers],
        "sliding_window": windows(config),
    }


def granite(config: Any) -> Fields:
    """Llama with factors on embedding, scores, what a layer adds, and logits."""
    return {
        **biases(config.attention_bias, getattr(config, "mlp_bias", False)),
        "embedding_scale": float(config.embedding_multiplier),
        "attention_scale": float(config.attention_multiplier),
        "residual_scale": float(config.residual_multiplier),
        "logit_scale": 1.0 / positive(config, "logits_scaling"),
    }


def _hyperclovax(config: Any) -> Fields:
    """Granite with norms after attention and MLP; logits are multiplied by their factor."""
    return {
        **granite(config),
        "logit_scale": positive(config, "logits_scaling"),
        "post_norm": bool(config.use_post_norm),
    }


def _cwm(config: Any) -> Fields:
    """Llama with sliding windows layer by layer."""
    return {**biases(False, config.mlp_bias), "sliding_window": windows(config)}


def olmo2(config: Any) -> Fields:
    """Norms after attention and MLP in place of before; norms over all queries and all keys."""
    return {
        **biases(config.attention_bias),
        "pre_norm": False,
        "post_norm": True,
        "qk_norm": "all",
    }


def _olmo3(config: Any) -> Fields:
    """OLMo 2 with sliding windows, whose layers do not scale their RoPE."""
    ropes, head_dim = config.rope_parameters, head_dim_of(config)
    return {
        **olmo2(config),
        "sliding_window": windows(config),
        "rope": rope_of(config, ropes["full_attention"], head_dim),
        "local_rope": rope_of(config, ropes["sliding_attention"], head_dim),
        "rope_layers": (True,) * config.num_hidden_layers,
    }


def exaone4(config: Any) -> Fields:
    """Norms after attention and MLP, and of query and key heads; RoPE in windows only."""
    hybrid = config.sliding_window is not None
    sliding = [kind == "sliding_attention" for kind in config.layer_types]
    return {
        "pre_norm": False,
        "post_norm": True,
        "qk_norm": "head",
        "sliding_window": windows(config),
        "rope_layers": tuple(slides or not hybrid for slides in sliding),
    }


def _arcee(config: Any) -> Fields:
    """Llama whose MLP has no gate."""
    return {**_llama(config), "gated": False}


def _apertus(config: Any) -> Fields:
    """Llama with norms on query and key heads, whose MLP has no gate."""
    return {**biases(config.attention_bias), "qk_norm": "head", "gated": False}


def _seed_oss(config: Any) -> Fields:
    """Llama whose output projection has a bias of its own."""
    return {**_llama(config), "o_bias": config.attention_out_bias}


def _ernie4_5(config: Any) -> Fields:
    """Llama whose neighbouring channels turn together."""
    return biases(config.use_bias, config.use_bias)


def _glm(config: Any) -> Fields:
    """Half of each head rotates, in neighbouring pairs."""
    return {"qkv_bias": config.attention_bias}


def _glm4(config: Any) -> Fields:
    """GLM with norms after attention and MLP, too."""
    return {**_glm(config), "post_norm": True}


AFTER = TensorNames(
    modules={
        "self_attn.post_norm": "post_attention_layernorm",
        "mlp.post_norm": "post_feedforward_layernorm",
    }
)
FAMILIES = {
    "llama": Family("Llama 1 to 3, SmolLM 1 and 2, Yi, many others", _llama),
    "mistral": Family("Mistral 7B, Mistral Nemo", _mistral),
    "ministral": Family("Ministral 8B of 2024", _ministral),
    "ministral3": Family("Ministral 3 3B to 14B", _ministral3),
    "qwen2": Family("Qwen 1.5, 2 and 2.5", _qwen2),
    "qwen3": Family("Qwen 3", _qwen3),
    "smollm3": Family("SmolLM3", _smollm3),
    "phi3": Family(
        "Phi-3, Phi-3.5, Phi-4", _mistral, TensorNames(fused_qkv="rows", fused_gate_up=True)
    ),
    "granite": Family("Granite 3", granite),
    "hyperclovax": Family(
        "HyperCLOVA X SEED Think",
        _hyperclovax,
        TensorNames(
            modules={"self_attn.post_norm": "post_norm1", "mlp.post_norm": "post_norm2"},
        ),
    ),
    "helium": Family("Helium 2B", _llama, TensorNames(rope_pairs=True)),
    "iquestcoder": Family("IQuest Coder 40B", _llama),
    "internlm3": Family("InternLM3 8B", _llama),
    "cwm": Family("CWM 32B", _cwm),
    "olmo2": Family("OLMo 2", olmo2, AFTER),
    "olmo3": Family("OLMo 3", _olmo3, AFTER),
    "exaone4": Family("EXAONE 4", exaone4, AFTER),
    "arcee": Family("Arcee AFM 4.5B", _arcee),
    "apertus": Family(
        "Apertus 8B, 70B",
        _apertus,
        TensorNames(
            modules={
                "input_layernorm": "attention_layernorm",
                "post_attention_layernorm": "feedforward_layernorm",
            }
        ),
    ),
    "seed_oss": Family("Seed-OSS 36B", _seed_oss),
    "ernie4_5": Family("ERNIE 4.5 0.3B", _ernie4_5, TensorNames(rope_pairs=True)),
    "glm": Family("GLM-4 9B of 2024", _glm, TensorNames(fused_gate_up=True, rope_pairs=True)),
    "glm4": Family(
        "GLM-4 0414, 9B and 32B",
        _glm4,
        TensorNames(
            fused_gate_up=True,
            rope_pairs=True,
            modules={
                "self_attn.post_norm": "post_self_attn_layernorm",
                "mlp.post_norm": "post_mlp_layernorm",
            },
        ),
    ),
}
