"""MiMo V2 Flash: value heads narrower than those of keys; other KV heads, and sinks, in windows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qoff.models.spec_parts import HeadsSpec, RopeSpec, unsupported
from qoff.schema import is_number

from .corrected import deepseek_experts
from .family import Family, Fields, TensorNames, rope_of, windows

_PART = 0.334  # of a head that rotates where a config does not say


def _mimo(config: Any) -> Fields:
    """V are scaled: so is what attention adds, as its output has no bias."""
    _check_published(config)
    kinds = {"full_attention", "sliding_attention"}
    ropes = config.rope_parameters
    if not isinstance(ropes, dict) or not kinds >= ropes.keys() >= {*config.layer_types}:
        raise unsupported("rope_parameters", ropes, "one object for each kind of layer_types")
    full, local = (
        _rope(config, ropes[kind]) if kind in ropes else None
        for kind in ("full_attention", "sliding_attention")
    )
    scale = 1.0 if config.attention_value_scale is None else config.attention_value_scale
    if not is_number(scale) or not scale:
        raise unsupported("attention_value_scale", scale, "null, or a number other than 0")
    sparse = [kind == "sparse" for kind in config.mlp_layer_types]
    return {
        "qkv_bias": config.attention_bias,
        "num_kv_heads": 2 * config.num_key_value_heads,
        "full_heads": HeadsSpec(config.head_dim, config.num_key_value_heads),
        "value_dim": config.v_head_dim if config.v_head_dim != config.head_dim else 0,
        "attention_output_scale": float(scale),
        "sinks": "windows",
        "sliding_window": windows(config),
        "rope": full or local,
        "local_rope": local,
        "rope_layers": (True,) * config.num_hidden_layers,
        "experts": deepseek_experts(config, sparse, 0) if any(sparse) else None,
    }


def _rope(config: Any, parameters: Mapping[str, Any]) -> RopeSpec:
    """That of a kind of layers, as transformers computes it."""
    if parameters.get("rope_type") == "default":
        parameters = {"partial_rotary_factor": _PART, **parameters}
    return rope_of(config, parameters, config.head_dim)


def _check_published(config: Any) -> None:
    """Raise UnsupportedModelError for what a config says otherwise than transformers computes it.

    The first checkpoints have fields of their own, which transformers takes for granted.
    """
    slides = [kind == "sliding_attention" for kind in config.layer_types]
    sparse = [kind == "sparse" for kind in config.mlp_layer_types]
    ropes = config.rope_parameters if isinstance(config.rope_parameters, dict) else {}
    full, local = (ropes.get(kind) or {} for kind in ("full_attention", "sliding_attention"))
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    for key, computed in (
        ("hybrid_layer_pattern", [int(x) for x in slides]),
        ("moe_layer_freq", [int(x) for x in sparse]),
        ("add_swa_attention_sink_bias", True),
        ("add_full_attention_sink_bias", False),
        ("swa_num_attention_heads", heads),
        ("swa_num_key_value_heads", 2 * kv_heads),
        ("swa_head_dim", config.head_dim),
        ("swa_v_head_dim", config.v_head_dim),
        ("rope_theta", full.get("rope_theta")),
        ("swa_rope_theta", local.get("rope_theta")),
        ("partial_rotary_factor", full.get("partial_rotary_factor", _PART)),
        ("layernorm_epsilon", config.rms_norm_eps),
        ("n_shared_experts", 0),
        ("scoring_func", "sigmoid"),
        ("topk_method", "noaux_tc"),
    ):
        found = getattr(config, key, None)
        if found is not None and found != computed:
            raise unsupported(key, found, str(computed))


_SINKS = {"self_attn.sinks": "self_attn.attention_sink_bias"}
_ROUTER = {
    "mlp.router": "mlp.gate",
    "mlp.router.correction": "mlp.gate.e_score_correction_bias",
}
FAMILIES = {
    "mimo_v2_flash": Family(
        "MiMo V2 Flash 309B-A15B", _mimo, TensorNames(modules={**_SINKS, **_ROUTER})
    ),
}
