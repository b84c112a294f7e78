"""Families most of whose layers have linear attention: Qwen3-Next, Qwen3.5 and OLMo Hybrid."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from qoff.models.recurrent_spec import LinearSpec
from qoff.models.spec_parts import unsupported

from .experts import qwen_experts
from .family import Config, Family, Fields, Has, TensorNames, biases, layers_with, mixture
from .llama import AFTER, olmo2

_KINDS = ("linear_attention", "full_attention")


def _layers(config: Any) -> Fields:
    """Gated DeltaNet, or attention times a gate with norms of query and key heads."""
    return {
        **biases(config.attention_bias),
        "qk_norm": "head",
        "gated_attention": True,
        "recurrent": _delta(config),
    }


def _delta(config: Any, **more: Any) -> LinearSpec:
    """Gated DeltaNet in the layers that are listed. more: of the spec."""
    if config.hidden_act != "silu":  # of convolutions, too
        raise unsupported("hidden_act", config.hidden_act, "silu")
    for kind in config.layer_types:
        if kind not in _KINDS:
            raise unsupported("layer_types", kind, ", ".join(_KINDS))
    return LinearSpec(
        key_heads=config.linear_num_key_heads,
        value_heads=config.linear_num_value_heads,
        key_dim=config.linear_key_head_dim,
        value_dim=config.linear_value_head_dim,
        taps=config.linear_conv_kernel_dim,
        layers=tuple(kind == "linear_attention" for kind in config.layer_types),
        **more,
    )


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


def _olmo_hybrid(config: Any) -> Fields:
    """OLMo 2 where it attends; layers with Gated DeltaNet have their norms before."""
    learns = 2.0 if config.linear_allow_neg_eigval else 1.0
    return {
        **olmo2(config),
        "states_pre_norm": True,
        "recurrent": _delta(config, learns=learns, apart=True, own_eps=_OLMO_EPS),
    }


def _olmo_converted(config: Config, has: Has) -> tuple[dict[str, Any], TensorNames]:
    """As published, as transformers calls its modules, or as it saves them.

    It saves all norms between attention and MLP under the name of those before the MLP.
    """
    modules = dict(_OLMO.modules)
    if any(layers_with(has, "attention_layer_norm.weight")):
        modules |= {
            "input_layernorm": "attention_layer_norm",
            "post_attention_layernorm": "feedforward_layer_norm",
        }
    for layer in layers_with(has, "self_attn.o_proj.weight"):
        if has(f"{layer}feedforward_layer_norm.weight"):
            modules["self_attn.post_norm"] = "feedforward_layer_norm"
    apart = any(layers_with(has, "linear_attn.q_conv1d.weight"))
    return dict(config), replace(_OLMO, modules=modules, split_conv=apart)


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


_OLMO_EPS = 1e-5  # of gated norms, whatever a config says of others
_OLMO = replace(
    AFTER,
    modules={
        **AFTER.modules,
        "linear_attn.norm": "linear_attn.o_norm",
        "linear_attn.out_proj": "linear_attn.o_proj",
    },
)
_NAMES = TensorNames(modules={"mlp.router": "mlp.gate"}, norm_offset=1.0)
_SPLIT = replace(_NAMES, split_linear="all")
FAMILIES = {
    "qwen3_next": Family("Qwen3-Next 80B-A3B", _qwen3_next, _NAMES),
    "qwen3_5_text": Family("Qwen 3.5, dense", _layers, _SPLIT, _qwen3_5),
    "qwen3_5_moe_text": Family("Qwen 3.5 35B-A3B and larger", _qwen3_5_moe, _SPLIT, _qwen3_5),
    "olmo_hybrid": Family("OLMo Hybrid 7B", _olmo_hybrid, _OLMO, _olmo_converted),
}
