"""Families most of whose layers have linear attention: Qwen3-Next and Qwen3.5."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from qoff.models.recurrent_spec import LinearSpec
from qoff.models.spec_parts import unsupported

from .experts import qwen_experts
from .family import Config, Family, Fields, Has, TensorNames, biases, mixture

_KINDS = ("linear_attention", "full_attention")


def _layers(config: Any) -> Fields:
    """Gated DeltaNet, or attention times a gate with norms of query and key heads."""
    if config.hidden_act != "silu":  # of convolutions, too
        raise unsupported("hidden_act", config.hidden_act, "silu")
    for kind in config.layer_types:
        if kind not in _KINDS:
            raise unsupported("layer_types", kind, ", ".join(_KINDS))
    return {
        **biases(config.attention_bias),
        "qk_norm": "head",
        "gated_attention": True,
        "recurrent": LinearSpec(
            key_heads=config.linear_num_key_heads,
            value_heads=config.linear_num_value_heads,
            key_dim=config.linear_key_head_dim,
            value_dim=config.linear_value_head_dim,
            taps=config.linear_conv_kernel_dim,
            layers=tuple(kind == "linear_attention" for kind in config.layer_types),
        ),
    }


def _qwen3_next(config: Any) -> Fields:
    """Experts in most layers, beside an MLP for all tokens."""
    found = _layers(config)
    if config.num_experts:
        shared = config.shared_expert_intermediate_size
        experts = qwen_experts(config, shared_size=shared, shared_gate=True)
        found["experts"] = experts if any(experts.layers) else None
    return found


def _qwen3_5_moe(config: Any) -> Fields:
    """Experts in every layer, whose weights are divided by their sum."""
    shared = config.shared_expert_intermediate_size
    return {
        **_layers(config),
        "intermediate_size": shared or config.moe_intermediate_size,
        "experts": mixture(config, shared_size=shared, shared_gate=True),
    }


def _qwen3_5(config: Config, has: Has) -> tuple[dict[str, Any], TensorNames]:
    """A source may be a part of one that sees."""
    if not has("model.language_model.embed_tokens.weight"):
        return dict(config), _SPLIT
    names = replace(
        _SPLIT,
        layer="model.language_model.layers.{}.",
        embedding="model.language_model.embed_tokens.weight",
        norm="model.language_model.norm",
    )
    return dict(config), names


_NAMES = TensorNames(modules={"mlp.router": "mlp.gate"}, norm_offset=1.0)
_SPLIT = replace(_NAMES, split_linear="all")
FAMILIES = {
    "qwen3_next": Family("Qwen3-Next 80B-A3B", _qwen3_next, _NAMES),
    "qwen3_5_text": Family("Qwen 3.5, dense", _layers, _SPLIT, _qwen3_5),
    "qwen3_5_moe_text": Family("Qwen 3.5 35B-A3B and larger", _qwen3_5_moe, _SPLIT, _qwen3_5),
}
