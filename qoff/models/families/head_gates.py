"""Families whose attention has gates of heads, and more heads in windows: Laguna, Step 3.5."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from qoff.models.spec_parts import ExpertsSpec, unsupported

from .family import (
    Family,
    Fields,
    TensorNames,
    for_all,
    head_dim_of,
    mixture,
    positive,
    rope_of,
    windows,
)


def _attention(config: Any) -> Fields:
    """Norms of query and key heads, gates, windows that have a RoPE of their own."""
    if config.attention_bias:  # of gates there would be none
        raise unsupported("attention_bias", True, "false")
    ropes, head_dim, layers = config.rope_parameters, head_dim_of(config), config.num_hidden_layers
    kinds = set(config.layer_types)
    full, local = (
        rope_of(config, ropes[kind], head_dim) if kind in kinds else None
        for kind in ("full_attention", "sliding_attention")
    )
    return {
        "qk_norm": "head",
        "gated_attention": True,
        "head_gates": _by_head(config),
        "sliding_window": windows(config),
        "rope": full or local,
        "local_rope": local,
        "rope_layers": (True,) * layers,
    }


def _by_head(config: Any) -> bool:
    """Whether a gate is of a head, not of each of its channels."""
    if config.gating not in (True, "per-head", "per-element"):
        raise unsupported("gating", config.gating, "true, per-head, per-element")
    return bool(config.gating != "per-element")


def _laguna(config: Any) -> Fields:
    """Gates that are a softplus; scores of the router level off."""
    return {
        **_attention(config),
        "gate_activation": "softplus",
        "layer_heads": _heads(config, config.num_attention_heads_per_layer),
        "experts": _experts(
            config,
            scale=positive(config, "moe_routed_scaling_factor"),
            score_cap=max(0.0, float(config.moe_router_logit_softcapping)),
            shared_size=config.shared_expert_intermediate_size,
        ),
    }


def _step(config: Any) -> Fields:
    """Gates that are a sigmoid; in some layers gate and up of MLP and experts are limited."""
    if config.mlp_bias:  # the shared expert would have them, too
        raise unsupported("mlp_bias", True, "false")
    if config.use_bidirectional_attention:
        raise unsupported("use_bidirectional_attention", True, "false")
    if not _by_head(config):
        raise unsupported("gating", config.gating, "true, per-head")
    own = (config.per_layer_config[i] for i in range(config.num_hidden_layers))
    return {
        **_attention(config),
        "layer_heads": _heads(config, (one.num_attention_heads for one in own)),
        "attention_scale": positive(config, "query_pre_attn_scalar") ** -0.5,
        "limits": _limits(config, "swiglu_limits_shared"),
        "experts": _experts(
            config,
            scale=positive(config, "moe_router_scaling_factor"),
            limits=_limits(config, "swiglu_limits"),
            shared_size=config.share_expert_dim,
        ),
    }


def _experts(config: Any, **more: Any) -> ExpertsSpec | None:
    """Experts as DeepSeek V3 has them, in one group; None: no layer has any."""
    layers = [kind == "sparse" for kind in config.mlp_layer_types]
    found = mixture(config, layers, shares="sigmoid", correction=True, **more)
    return found if any(layers) else None


def _heads(config: Any, by_layer: Iterable[int]) -> tuple[int, ...] | None:
    """Query heads of each layer; None: all have as many as the config says."""
    found = tuple(by_layer)
    return None if set(found) == {for_all(config, "num_attention_heads", None)} else found


def _limits(config: Any, key: str) -> tuple[float, ...] | None:
    """Those of each layer, 0 for none; None: no layer has one."""
    found = tuple(float(limit or 0) for limit in getattr(config, key) or ())
    return found if any(found) else None


_GATE = {"self_attn.gate_proj": "self_attn.g_proj"}
FAMILIES = {
    "laguna": Family(
        "Laguna 33B-A3B and larger",
        _laguna,
        TensorNames(
            modules={
                **_GATE,
                "mlp.router": "mlp.gate",
                "mlp.router.correction": "mlp.experts.e_score_correction_bias",
            },
            modules_of_transformers={"mlp.shared_expert": "mlp.shared_experts"},
            split_gates=True,
        ),
    ),
    "step3p5": Family(
        "Step 3.5 Flash 196B-A11B",
        _step,
        TensorNames(
            modules={
                **_GATE,
                "mlp.router": "moe.gate",
                "mlp.router.correction": "moe.router_bias",
                "mlp.experts": "moe",
                "mlp.shared_expert": "share_expert",
            },
            modules_of_transformers={"share_expert": "mlp.shared_experts"},
            stacked_experts="rows",
            split_gates=True,
            norm_offset=1.0,
        ),
    ),
}
