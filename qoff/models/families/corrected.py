"""Families whose routers choose by corrected shares, as DeepSeek V3's: GLM 4.5, MiniMax M2, ..."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from qoff.models.spec_parts import ExpertsSpec, unsupported

from .family import Family, Fields, TensorNames, activation, biases, mixture, positive, windows
from .llama import exaone4


def _glm4_moe(config: Any) -> Fields:
    """A part of each head rotates; norms of query and key heads in the larger models."""
    return {
        "qkv_bias": config.attention_bias,
        "qk_norm": "head" if config.use_qk_norm else "none",
        "experts": deepseek_experts(config, after(config, config.first_k_dense_replace)),
    }


def _dots1(config: Any) -> Fields:
    """Qwen3 with experts behind the first layers."""
    return {
        **biases(config.attention_bias),
        "qk_norm": "head",
        "sliding_window": windows(config),
        "experts": deepseek_experts(config, after(config, config.first_k_dense_replace)),
    }


def _solar_open(config: Any) -> Fields:
    """Llama with experts in every layer; no layer has an MLP of its own."""
    experts = deepseek_experts(config, after(config, 0))
    return {
        "qkv_bias": config.attention_bias,
        "intermediate_size": experts.intermediate_size,
        "experts": experts,
    }


def _exaone_moe(config: Any) -> Fields:
    """EXAONE 4 with norms before attention and MLP, and experts in most layers."""
    return {
        **exaone4(config),
        "pre_norm": True,
        "post_norm": False,
        "experts": deepseek_experts(
            config, (kind == "sparse" for kind in config.mlp_layer_types), config.num_shared_experts
        ),
    }


def _minimax_m2(config: Any) -> Fields:
    """Norms of all queries and of all keys; a part of each head rotates; no shared expert."""
    return {"qk_norm": "all", "experts": mixture(config, shares="sigmoid", correction=True)}


def _hy_v3(config: Any) -> Fields:
    """Llama with norms of query and key heads, and experts in most layers."""
    if config.mlp_bias:  # the shared expert would have them, too
        raise unsupported("mlp_bias", True, "false")
    layers = (kind == "sparse" for kind in config.mlp_layer_types)
    return {
        **biases(config.attention_bias),
        "qk_norm": "head",
        "experts": _by_sigmoids(config, layers, "router_scaling_factor"),
    }


def _afmoe(config: Any) -> Fields:
    """Norms after attention and MLP, too; gates after attention; RoPE in windows only."""
    if config.attention_bias:  # of gates there would be none
        raise unsupported("attention_bias", True, "false")
    return {
        "qk_norm": "head",
        "post_norm": True,
        "gated_attention": True,
        "sliding_window": windows(config),
        "rope_layers": tuple(kind == "sliding_attention" for kind in config.layer_types),
        "embedding_scale": config.hidden_size**0.5 if config.mup_enabled else 1.0,
        "experts": _by_sigmoids(config, after(config, config.num_dense_layers), "route_scale"),
    }


def _ernie4_5_moe(config: Any) -> Fields:
    """Llama with experts; the correction is of the softmax. Pairs of channels turn."""
    if (config.moe_norm_min or 0) > 1e-9:
        raise unsupported("moe_norm_min", config.moe_norm_min, "up to 1e-9, which has no effect")
    if config.use_bias:
        raise unsupported("use_bias", True, "false")
    first, last = config.moe_layer_start_index or 0, config.moe_layer_end_index
    step = int(positive(config, "moe_layer_interval"))
    layers = range(config.num_hidden_layers)
    last = layers[-1] if last is None else last
    experts = ExpertsSpec(
        count=config.moe_num_experts,
        top_k=config.moe_k,
        intermediate_size=config.moe_intermediate_size,
        layers=tuple((i + 1) % step == 0 and first <= i <= last for i in layers),
        correction=True,
        activation=activation(config.hidden_act),
        shared_size=config.moe_intermediate_size * (config.moe_num_shared_experts or 0),
    )
    return {"experts": experts}


def _by_sigmoids(config: Any, layers: Iterable[bool], factor: str) -> ExpertsSpec:
    """Experts in one group, with shared ones beside them. factor: the field of their weights'."""
    return mixture(
        config,
        layers,
        shares="sigmoid",
        scale=positive(config, factor),
        correction=True,
        shared_size=config.moe_intermediate_size * (config.num_shared_experts or 0),
    )


def deepseek_experts(config: Any, layers: Iterable[bool], shared: int | None = None) -> ExpertsSpec:
    """Experts as DeepSeek V3 has them, arXiv 2412.19437, with shared ones beside them."""
    shared = config.n_shared_experts if shared is None else shared
    return mixture(
        config,
        layers,
        shares="sigmoid",
        normalized=bool(config.norm_topk_prob),
        groups=config.n_group or 1,
        top_groups=config.topk_group or 1,
        scale=positive(config, "routed_scaling_factor"),
        correction=True,
        shared_size=config.moe_intermediate_size * (shared or 0),
    )


def after(config: Any, first: int | None) -> tuple[bool, ...]:
    """Experts in all layers but the first ones."""
    return tuple(i >= (first or 0) for i in range(config.num_hidden_layers))


SHARED = {"mlp.router": "mlp.gate", "mlp.shared_expert": "mlp.shared_experts"}
NAMES = TensorNames(modules={**SHARED, "mlp.router.correction": "mlp.gate.e_score_correction_bias"})
FAMILIES = {
    "glm4_moe": Family("GLM 4.5, 4.6 and 4.7, with Air", _glm4_moe, NAMES),
    "dots1": Family("dots.llm1", _dots1, NAMES),
    "solar_open": Family("Solar Open 100B", _solar_open, NAMES),
    "exaone_moe": Family(
        "K-EXAONE 236B",
        _exaone_moe,
        TensorNames(modules={**SHARED, "mlp.router.correction": "mlp.e_score_correction_bias"}),
    ),
    "minimax_m2": Family(
        "MiniMax M2",
        _minimax_m2,
        TensorNames(
            modules={
                "mlp": "block_sparse_moe",
                "mlp.router": "block_sparse_moe.gate",
                "mlp.router.correction": "block_sparse_moe.e_score_correction_bias",
            },
            leaves={"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"},
        ),
    ),
    "hy_v3": Family(
        "Hunyuan 3",
        _hy_v3,
        TensorNames(
            modules={
                "mlp.router": "mlp.router.gate",
                "mlp.router.correction": "mlp.expert_bias",
                "mlp.shared_expert": "mlp.shared_mlp",
            }
        ),
    ),
    "afmoe": Family(
        "Trinity Nano, Mini and Large 400B",
        _afmoe,
        TensorNames(
            modules={
                "self_attn.post_norm": "post_attention_layernorm",
                "post_attention_layernorm": "pre_mlp_layernorm",
                "mlp.post_norm": "post_mlp_layernorm",
                "mlp.router": "mlp.router.gate",
                "mlp.router.correction": "mlp.expert_bias",
                "mlp.shared_expert": "mlp.shared_experts",
            },
            split_gates=True,
        ),
    ),
    "ernie4_5_moe": Family(
        "ERNIE 4.5 21B-A3B, 300B-A47B",
        _ernie4_5_moe,
        TensorNames(
            modules={
                **SHARED,
                "mlp.router.correction": "mlp.moe_statics.e_score_correction_bias",
            },
            rope_pairs=True,
            correction_in_row=True,
        ),
    ),
}
