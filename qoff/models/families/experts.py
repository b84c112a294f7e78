"""Families with a mixture of experts."""

from __future__ import annotations

from typing import Any

from qoff.models.spec_parts import ExpertsSpec, unsupported

from .family import Family, Fields, TensorNames, activation, biases, one_window, positive, windows
from .llama import granite


def _mixtral(config: Any) -> Fields:
    """Mistral with experts in every layer."""
    experts = _everywhere(config, activation=activation(config.hidden_act))
    return {"sliding_window": one_window(config), "experts": experts}


def _qwen3_moe(config: Any) -> Fields:
    """Qwen3 with experts in some layers."""
    window = config.sliding_window if config.use_sliding_window else None
    return {
        **biases(config.attention_bias),
        "qk_norm": "head",
        "sliding_window": (window,) * config.num_hidden_layers,
        "experts": _qwen_experts(config),
    }


def _qwen2_moe(config: Any) -> Fields:
    """Qwen2 with experts in some layers, beside an MLP for all tokens."""
    shared = config.shared_expert_intermediate_size
    return {
        "qkv_bias": config.qkv_bias,
        "sliding_window": windows(config),
        "experts": _qwen_experts(config, shared_size=shared, shared_gate=True),
    }


def _qwen_experts(config: Any, **more: Any) -> ExpertsSpec:
    layers = range(config.num_hidden_layers)
    step = int(positive(config, "decoder_sparse_step"))
    plain = config.mlp_only_layers or ()
    return ExpertsSpec(
        count=config.num_experts,
        top_k=config.num_experts_per_tok,
        intermediate_size=config.moe_intermediate_size,
        layers=tuple(i not in plain and (i + 1) % step == 0 for i in layers),
        normalized=config.norm_topk_prob,
        activation=activation(config.hidden_act),
        **more,
    )


def _olmoe(config: Any) -> Fields:
    """Norms of all queries and of all keys; experts in every layer."""
    if config.clip_qkv is not None:
        raise unsupported("clip_qkv", config.clip_qkv, "null")
    experts = _everywhere(
        config, normalized=config.norm_topk_prob, activation=activation(config.hidden_act)
    )
    return {**biases(config.attention_bias), "qk_norm": "all", "experts": experts}


def _granite_moe(config: Any) -> Fields:
    """Granite with experts in every layer, whose weights have the factor of the residual."""
    experts = _everywhere(
        config,
        shares="topk",
        normalized=False,
        scale=float(config.residual_multiplier),
        activation=activation(config.hidden_act),
    )
    return {**granite(config), "experts": experts}


def _gpt_oss(config: Any) -> Fields:
    """Sinks, biases everywhere, and a clamped activation."""
    for key, wanted in (("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)):
        if getattr(config, key, wanted) != wanted:
            raise unsupported(key, getattr(config, key), str(wanted))
    return {
        **biases(config.attention_bias),
        "sinks": True,
        "sliding_window": windows(config),
        "experts": _everywhere(
            config,
            shares="topk",
            normalized=False,
            activation="clamped_swiglu",
            router_bias=True,
            bias=True,
        ),
    }


def _everywhere(config: Any, **more: Any) -> ExpertsSpec:
    """Experts in all layers."""
    return ExpertsSpec(
        count=getattr(config, "num_local_experts", None) or config.num_experts,
        top_k=config.num_experts_per_tok,
        intermediate_size=config.intermediate_size,
        layers=(True,) * config.num_hidden_layers,
        **more,
    )


_QWEN_NAMES = TensorNames(modules={"mlp.router": "mlp.gate"})
FAMILIES = {
    "mixtral": Family(
        "Mixtral 8x7B, 8x22B",
        _mixtral,
        TensorNames(
            modules={"mlp.router": "block_sparse_moe.gate", "mlp": "block_sparse_moe"},
            leaves={"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"},
        ),
    ),
    "qwen2_moe": Family("Qwen 1.5 and 2 MoE", _qwen2_moe, _QWEN_NAMES),
    "qwen3_moe": Family("Qwen 3 MoE 30B-A3B, 235B-A22B", _qwen3_moe, _QWEN_NAMES),
    "olmoe": Family("OLMoE 1B-7B", _olmoe, _QWEN_NAMES),
    "granitemoe": Family(
        "Granite 3 MoE 1B-A400M, 3B-A800M",
        _granite_moe,
        TensorNames(
            modules={
                "mlp.router": "block_sparse_moe.router.layer",
                "mlp.experts.gate_up_proj": "block_sparse_moe.input_linear",
                "mlp.experts.down_proj": "block_sparse_moe.output_linear",
            },
            stacked_experts="halves",
        ),
    ),
    "gpt_oss": Family("gpt-oss 20B, 120B", _gpt_oss, TensorNames(stacked_experts="columns")),
}
