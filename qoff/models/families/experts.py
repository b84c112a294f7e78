"""Families with a mixture of experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from qoff.kernels.layout.heads import QueryScale
from qoff.models.spec_parts import ExpertsSpec, RopeSpec, unsupported
from qoff.schema import is_number

from .family import (
    Family,
    Fields,
    Has,
    TensorNames,
    biases,
    head_dim_of,
    mixture,
    one_window,
    positive,
    rope_of,
    windows,
)
from .llama import granite

_FIRST_EXPERTS = 64  # layers, among which one has experts if any has


def _mixtral(config: Any) -> Fields:
    """Mistral with experts in every layer."""
    return {"sliding_window": one_window(config), "experts": mixture(config)}


def _phimoe(config: Any) -> Fields:
    """Mixtral with LayerNorm, biases and a SparseMixer, which always chooses two."""
    jitter, count = config.router_jitter_noise, config.num_experts_per_tok
    if not is_number(jitter) or not jitter >= 0:
        raise unsupported("router_jitter_noise", jitter, "0 or a number above it")
    if count != 2:
        raise unsupported("num_experts_per_tok", count, "2 in this family")
    experts = mixture(config, shares="mixer", normalized=False, jitter=float(jitter))
    return {
        **_mixtral(config),
        **biases(config.attention_bias),
        "experts": experts,
        "norm": "layer",
        "head_bias": bool(config.lm_head_bias),
        "rope": _with_mscale(config),
    }


def _with_mscale(config: Any) -> RopeSpec:
    """RoPE whose cosines and sines are multiplied by a number of the config, up to its length."""
    rope = dict(config.rope_parameters)
    kind = rope["rope_type"]
    if kind not in ("default", "longrope"):
        raise unsupported("rope_parameters.rope_type", kind, "default, longrope")
    scale, _ = rope.pop("short_mscale", None), rope.pop("long_mscale", None)
    if kind == "longrope":
        if not is_number(scale) or not scale > 0:
            raise unsupported("rope_parameters.short_mscale", scale, "a number above 0")
        rope["attention_factor"] = float(scale)
    return rope_of(config, rope, head_dim_of(config))


def _qwen3_moe(config: Any) -> Fields:
    """Qwen3 with experts in some layers."""
    window = config.sliding_window if config.use_sliding_window else None
    return {
        **biases(config.attention_bias),
        "qk_norm": "head",
        "sliding_window": (window,) * config.num_hidden_layers,
        "experts": qwen_experts(config),
    }


def _qwen2_moe(config: Any) -> Fields:
    """Qwen2 with experts in some layers, beside an MLP for all tokens."""
    shared = config.shared_expert_intermediate_size
    return {
        "qkv_bias": config.qkv_bias,
        "sliding_window": windows(config),
        "experts": qwen_experts(config, shared_size=shared, shared_gate=True),
    }


def qwen_experts(config: Any, **more: Any) -> ExpertsSpec:
    """Experts in every so many layers, but for those that are named."""
    layers = range(config.num_hidden_layers)
    step = int(positive(config, "decoder_sparse_step"))
    plain = config.mlp_only_layers or ()
    found = (i not in plain and (i + 1) % step == 0 for i in layers)
    return mixture(config, found, normalized=config.norm_topk_prob, **more)


def _olmoe(config: Any) -> Fields:
    """Norms of all queries and of all keys; experts in every layer."""
    if config.clip_qkv is not None:
        raise unsupported("clip_qkv", config.clip_qkv, "null")
    experts = mixture(config, normalized=config.norm_topk_prob)
    return {**biases(config.attention_bias), "qk_norm": "all", "experts": experts}


def _granite_moe(config: Any) -> Fields:
    """Granite with experts in every layer, whose weights have the factor of the residual."""
    scale = float(config.residual_multiplier)
    experts = mixture(config, shares="topk", normalized=False, scale=scale)
    return {**granite(config), "experts": experts}


def _granite_moe_shared(config: Any) -> Fields:
    """Granite with experts, beside an MLP for all tokens."""
    found = _granite_moe(config)
    experts = replace(found["experts"], shared_size=config.shared_intermediate_size)
    return {**found, "experts": experts}


def _mellum(config: Any) -> Fields:
    """Qwen3 with experts in most layers, whose windows have a RoPE of their own."""
    ropes, head_dim = config.rope_parameters, head_dim_of(config)
    return {
        **biases(config.attention_bias),
        "qk_norm": "head",
        "sliding_window": windows(config),
        "rope": rope_of(config, ropes["full_attention"], head_dim),
        "local_rope": rope_of(config, ropes["sliding_attention"], head_dim),
        "rope_layers": (True,) * config.num_hidden_layers,
        "experts": mixture(
            config,
            (kind == "sparse" for kind in config.mlp_layer_types),
            normalized=config.norm_topk_prob,
        ),
    }


def _gpt_oss(config: Any) -> Fields:
    """Sinks, biases everywhere, and a clamped activation."""
    for key, wanted in (("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)):
        if getattr(config, key, wanted) != wanted:
            raise unsupported(key, getattr(config, key), str(wanted))
    return {
        **biases(config.attention_bias),
        "sinks": "all",
        "sliding_window": windows(config),
        "experts": mixture(
            config,
            shares="topk",
            normalized=False,
            activation="clamped_swiglu",
            router_bias=True,
            bias=True,
        ),
    }


def _llama4(config: Any) -> Fields:
    """Layers with RoPE see their chunk; in others queries are scaled by position.

    A token's expert is given its input times a weight.
    """
    layers = range(config.num_hidden_layers)
    rotates = tuple(bool(x) for x in config.no_rope_layers)[: len(layers)]
    if "chunked_attention" in config.layer_types and config.attention_chunk_size is None:
        raise unsupported("attention_chunk_size", None, "a whole number above 0")
    scale = QueryScale(float(config.attn_scale), config.floor_scale, ahead=1)
    return {
        **biases(config.attention_bias),
        "intermediate_size": config.intermediate_size_mlp,
        "rope_layers": rotates,
        "sliding_window": windows(config),
        "chunked": True,
        "qk_norm": "unweighted" if config.use_qk_norm else "none",
        "query_scale": scale if config.attn_temperature_tuning else None,
        "scaled_layers": tuple(not x for x in rotates),
        "experts": mixture(
            config,
            (i in config.moe_layers for i in layers),
            shares="sigmoid",
            normalized=False,
            weighs_input=True,
            shared_size=config.intermediate_size,
        ),
    }


def as_stored(names: TensorNames, has: Has) -> TensorNames:
    """The names of a source whose experts are in one tensor or apart, whatever the family does.

    transformers 5 has them in one tensor, and tools that quantize take them apart.
    """
    if names.stacked_experts not in ("", "bare-halves", "column-halves"):
        return names
    for layer in range(_FIRST_EXPERTS):
        if has(names.in_layer(layer, "mlp.experts.0.up_proj", "weight")):
            return replace(names, stacked_experts="")
        stacked = (f"mlp.experts.{name}" for name in ("gate_up_proj", "up_proj"))
        if any(has(names.in_layer(layer, name, "")) for name in stacked):
            return replace(names, stacked_experts=names.stacked_experts or "bare-halves")
    return names


def as_shaped(
    names: TensorNames,
    layer: int,
    sizes: tuple[int, int],
    shape_of: Callable[[str], tuple[int, ...] | None],
) -> TensorNames:
    """The names of a source whose experts' matrices are transposed or not, as their shapes say.

    Qwen 3 VL is published transposed, and saved by transformers 5 as other models are. layer: has
    experts. sizes: hidden and intermediate.
    """
    if names.stacked_experts != "column-halves":
        return names
    hidden, inner = sizes
    for name, rows, columns in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
        shape = shape_of(names.in_layer(layer, f"mlp.experts.{name}", ""))
        if rows != columns and shape is not None and shape[1:] == (rows, columns):
            return replace(names, stacked_experts="bare-halves")
    return names


_QWEN_NAMES = TensorNames(modules={"mlp.router": "mlp.gate"})
_GRANITE_NAMES = TensorNames(
    modules={
        "mlp.router": "block_sparse_moe.router.layer",
        "mlp.experts.gate_up_proj": "block_sparse_moe.input_linear",
        "mlp.experts.down_proj": "block_sparse_moe.output_linear",
    },
    stacked_experts="halves",
)
GRANITE_SHARED = replace(
    _GRANITE_NAMES,
    fused_gate_up=True,
    modules={
        **_GRANITE_NAMES.modules,
        "mlp.shared_expert.gate_up_proj": "shared_mlp.input_linear",
        "mlp.shared_expert.down_proj": "shared_mlp.output_linear",
    },
)
_MIXTRAL_NAMES = TensorNames(
    modules={"mlp.router": "block_sparse_moe.gate", "mlp": "block_sparse_moe"},
    leaves={"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"},
)
FAMILIES = {
    "mixtral": Family(
        "Mixtral 8x7B, 8x22B",
        _mixtral,
        _MIXTRAL_NAMES,
    ),
    "phimoe": Family("Phi-3.5 MoE, Phi mini MoE, Phi tiny MoE", _phimoe, _MIXTRAL_NAMES),
    "qwen2_moe": Family("Qwen 1.5 and 2 MoE", _qwen2_moe, _QWEN_NAMES),
    "qwen3_moe": Family("Qwen 3 MoE 30B-A3B, 235B-A22B", _qwen3_moe, _QWEN_NAMES),
    "olmoe": Family("OLMoE 1B-7B", _olmoe, _QWEN_NAMES),
    "granitemoe": Family("Granite 3 MoE 1B-A400M, 3B-A800M", _granite_moe, _GRANITE_NAMES),
    "granitemoeshared": Family(
        "Granite 3 MoE with a shared expert",
        _granite_moe_shared,
        GRANITE_SHARED,
    ),
    "mellum": Family("Mellum 2", _mellum, _QWEN_NAMES),
    "llama4_text": Family(
        "Llama 4 Scout 109B-A17B, Maverick 400B-A17B",
        _llama4,
        TensorNames(
            modules={"mlp": "feed_forward"}, stacked_experts="column-halves", rope_pairs=True
        ),
    ),
    "gpt_oss": Family("gpt-oss 20B, 120B", _gpt_oss, TensorNames(stacked_experts="columns")),
}
