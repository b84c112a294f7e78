"""Families with multi-head latent attention: DeepSeek V2 to V3.2, GLM 4.7 Flash, GLM 5, Youtu."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from qoff.models.spec_parts import IndexSpec, LatentSpec, unsupported

from .corrected import NAMES, SHARED, after, deepseek_experts
from .family import Family, Fields, TensorNames, mixture, positive, query_scale, rope_of


def latent_attention(config: Any, rope: Mapping[str, Any] | None = None) -> Fields:
    """Attention: RoPE rotates pairs of channels; YaRN scales scores by `mscale` squared.

    rope: where it is not all of `rope_parameters`.
    """
    if not getattr(config, "rope_interleave", True):
        raise unsupported("rope_interleave", False, "true")
    if config.attention_bias and config.q_lora_rank is None:
        raise unsupported("attention_bias", True, "false, where q_lora_rank is null")
    rope = config.rope_parameters if rope is None else rope
    if rope.get("partial_rotary_factor", 1.0) != 1:
        raise unsupported("partial_rotary_factor", rope["partial_rotary_factor"], "1")
    head_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
    return {
        "num_kv_heads": 1,
        "head_dim": head_dim,
        "attention_scale": head_dim**-0.5 * _mscale(rope) ** 2,
        "qkv_bias": config.attention_bias,
        "o_bias": config.attention_bias,
        "latent": LatentSpec(
            latent=config.kv_lora_rank,
            nope_dim=config.qk_nope_head_dim,
            rope_dim=config.qk_rope_head_dim,
            value_dim=config.v_head_dim,
            query_latent=config.q_lora_rank or 0,
        ),
    }


def _mscale(rope: Mapping[str, Any]) -> float:
    """What DeepSeek's YaRN multiplies queries and keys by beyond what RoPE does."""
    factor, all_dims = rope.get("factor", 1.0), rope.get("mscale_all_dim", 0.0)
    if rope.get("rope_type", "default") == "default" or not all_dims or factor <= 1:
        return 1.0
    return 0.1 * all_dims * math.log(factor) + 1.0


def _deepseek_v3(config: Any) -> Fields:
    """Experts as others took them over."""
    layers = after(config, config.first_k_dense_replace)
    return {**latent_attention(config), "experts": deepseek_experts(config, layers)}


def _mistral4(config: Any) -> Fields:
    """DeepSeek V3's attention, whose queries are scaled by position; shares are of the softmax."""
    scale, rope = query_scale(config)
    for key in ("partial_rotary_factor", "max_position_embeddings"):
        rope.pop(key, None)  # the channels that rotate are counted by `qk_rope_head_dim`
    experts = mixture(
        config,
        after(config, config.first_k_dense_replace),
        normalized=bool(config.norm_topk_prob),
        groups=config.n_group or 1,
        top_groups=config.topk_group or 1,
        scale=positive(config, "routed_scaling_factor"),
        shared_size=config.moe_intermediate_size * (config.n_shared_experts or 0),
    )
    return {
        **latent_attention(config, rope),
        **scale,
        "rope": rope_of(config, rope, config.qk_rope_head_dim),
        "experts": experts,
    }


def _deepseek_v2(config: Any) -> Fields:
    """Shares are of the softmax, not divided by their sum; a group is as good as its best."""
    if config.mlp_bias:
        raise unsupported("mlp_bias", True, "false")
    if config.norm_topk_prob:
        raise unsupported("norm_topk_prob", True, "false")
    grouped = {"greedy": False, "group_limited_greedy": True}.get(config.topk_method)
    if grouped is None:
        raise unsupported("topk_method", config.topk_method, "greedy, group_limited_greedy")
    experts = mixture(
        config,
        after(config, config.first_k_dense_replace),
        normalized=False,
        groups=(config.n_group or 1) if grouped else 1,
        top_groups=(config.topk_group or 1) if grouped else 1,
        group_best=1,
        scale=positive(config, "routed_scaling_factor"),
        shared_size=config.moe_intermediate_size * (config.n_shared_experts or 0),
    )
    return {**latent_attention(config), "experts": experts}


def _glm4_moe_lite(config: Any) -> Fields:
    """DeepSeek V3 that says layer by layer which have experts."""
    layers = (kind == "sparse" for kind in config.mlp_layer_types)
    return {**latent_attention(config), "experts": deepseek_experts(config, layers)}


def _indexed(config: Any) -> Fields:
    """GLM 4.7 Flash with an index of keys, in all layers where nothing else is said."""
    kinds = getattr(config, "indexer_types", None) or ["full"] * config.num_hidden_layers
    if not set(kinds) <= {"full", "shared"}:
        raise unsupported("indexer_types", kinds, "full, shared")
    if not config.q_lora_rank:
        raise unsupported("q_lora_rank", config.q_lora_rank, "a size, which the index is of")
    index = IndexSpec(
        heads=config.index_n_heads,
        dim=config.index_head_dim,
        rope_dim=config.qk_rope_head_dim,
        top=config.index_topk,
        layers=tuple(kind == "full" for kind in kinds),
    )
    return {**_glm4_moe_lite(config), "index": index}


_V3 = replace(NAMES, rope_pairs=True)
FAMILIES = {
    "deepseek_v2": Family(
        "DeepSeek V2, V2.5 and their Lite models",
        _deepseek_v2,
        TensorNames(modules=SHARED, rope_pairs=True),
    ),
    "deepseek_v3": Family("DeepSeek V3, V3.1 and R1", _deepseek_v3, _V3),
    "deepseek_v32": Family("DeepSeek V3.2", _indexed, _V3),
    "glm4_moe_lite": Family("GLM 4.7 Flash", _glm4_moe_lite, _V3),
    "glm_moe_dsa": Family("GLM 5", _indexed, replace(_V3, index_pairs=True)),
    "mistral4": Family(
        "Mistral Small 4 119B-A6B, Large 3 as GGUF",
        _mistral4,
        TensorNames(modules=SHARED, rope_pairs=True, stacked_experts="bare-halves"),
    ),
    "youtu": Family("Youtu-LLM 2B", latent_attention, _V3),
}
