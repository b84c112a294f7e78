"""Gemma: scaled embeddings, norms stored less one, heads of their own size."""

from __future__ import annotations

from typing import Any

from qoff.models.spec_parts import unsupported

from .family import (
    Family,
    Fields,
    TensorNames,
    activation,
    biases,
    positive,
    rope_of,
    windows,
)


def _gemma(config: Any) -> Fields:
    """Llama with scaled embeddings and a GELU."""
    act = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)
    if getattr(config, "use_bidirectional_attention", None):
        raise unsupported("use_bidirectional_attention", True, "false")
    return {
        "activation": activation(act or "gelu_pytorch_tanh"),
        **biases(config.attention_bias),
        "embedding_scale": float(config.hidden_size) ** 0.5,
    }


def _gemma2(config: Any) -> Fields:
    """Norms before and after, soft caps, a sliding window in every other layer."""
    return {
        **_gemma(config),
        "post_norm": True,
        "attention_scale": positive(config, "query_pre_attn_scalar") ** -0.5,
        "attention_soft_cap": config.attn_logit_softcapping or 0.0,
        "logit_soft_cap": config.final_logit_softcapping or 0.0,
        "sliding_window": windows(config),
    }


def _gemma3(config: Any) -> Fields:
    """Norms of query and key heads; layers with a sliding window have a RoPE of their own.

    transformers' attention ignores `attn_logit_softcapping` here.
    """
    ropes = config.rope_parameters
    layers = config.num_hidden_layers
    return {
        **_gemma2(config),
        "attention_soft_cap": 0.0,
        "qk_norm": "head",
        "rope": rope_of(config, ropes["full_attention"], config.head_dim),
        "local_rope": rope_of(config, ropes["sliding_attention"], config.head_dim),
        "rope_layers": (True,) * layers,
    }


_SANDWICH = {
    "post_attention_layernorm": "pre_feedforward_layernorm",
    "self_attn.post_norm": "post_attention_layernorm",
    "mlp.post_norm": "post_feedforward_layernorm",
}
_NAMES = TensorNames(norm_offset=1.0, modules=_SANDWICH)
FAMILIES = {
    "gemma": Family("Gemma 1", _gemma, TensorNames(norm_offset=1.0)),
    "gemma2": Family("Gemma 2", _gemma2, _NAMES),
    "gemma3_text": Family("Gemma 3 1B", _gemma3, _NAMES),
}
