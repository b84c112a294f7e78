"""What the fields of a `config.json` may be, before transformers makes its config object of them.

transformers checks types of some fields of some classes, and makes lists as long as a model has
layers before anyone can compare that number with the tensors that are there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qoff.models.spec_parts import unsupported
from qoff.schema import (
    SPECIAL_TOKENS,
    SWITCH,
    TEXT,
    Fields,
    either,
    first_wrong,
    list_of,
    nothing_or,
    number,
    whole,
)

_MANY = 1 << 16  # more layers or experts than any model has
_SIZE = whole(1, words="a whole number above 0, below 2**31")
_COUNT = whole(1, _MANY, f"a whole number from 1 to {_MANY}")
_EXPERTS = nothing_or(whole(0, _MANY))
_FACTOR = number(-1e30, 1e30, "a finite number")
_LIMIT = number(0, 1e30, "null, or a finite number of 0 and more")
_EPS = number(0, 1, "a number from 0 to 1")
_TUNING = "attn_temperature_tuning"
FIELDS: Fields = {
    "model_type": TEXT,
    "vocab_size": _SIZE,
    "hidden_size": _SIZE,
    "intermediate_size": either(_SIZE, list_of(_SIZE)),
    "intermediate_size_mlp": _SIZE,
    "ffn_dim": _SIZE,
    "moe_intermediate_size": nothing_or(_SIZE),
    **dict.fromkeys(("shared_expert_intermediate_size", "share_expert_dim"), whole(0)),
    "word_embed_proj_dim": nothing_or(_SIZE),
    "num_hidden_layers": _COUNT,
    "num_attention_heads": _COUNT,
    "num_attention_heads_per_layer": nothing_or(list_of(_COUNT)),
    **dict.fromkeys(("num_sliding_attention_heads", "num_attention_groups"), nothing_or(_COUNT)),
    "num_key_value_heads": nothing_or(_COUNT),
    "head_dim": nothing_or(_SIZE),
    "max_position_embeddings": _SIZE,
    "original_max_position_embeddings": nothing_or(_SIZE),
    **dict.fromkeys(("num_experts", "num_local_experts", "num_experts_per_tok"), _EXPERTS),
    **dict.fromkeys(("n_routed_experts", "moe_num_experts", "moe_k", "top_k_experts"), _EXPERTS),
    **dict.fromkeys(("global_head_dim", "num_global_key_value_heads"), nothing_or(_SIZE)),
    **dict.fromkeys(("hidden_size_per_layer_input", "num_kv_shared_layers"), nothing_or(whole(0))),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), _EXPERTS),
    **dict.fromkeys(("n_group", "topk_group"), nothing_or(_COUNT)),
    **dict.fromkeys(("first_k_dense_replace", "moe_layer_start_index"), nothing_or(whole(0))),
    "num_dense_layers": nothing_or(whole(0)),
    **dict.fromkeys(("block_ff_dim", "block_multiple_of"), _SIZE),
    "block_ffn_dim_multiplier": _FACTOR,
    **dict.fromkeys(("altup_num_inputs", "laurel_rank"), _COUNT),
    "activation_sparsity_pattern": nothing_or(list_of(_EPS)),
    "q_lora_rank": nothing_or(_SIZE),
    **dict.fromkeys(("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), _SIZE),
    "moe_layer_end_index": nothing_or(whole(-1)),
    "moe_layer_interval": nothing_or(whole(1)),
    "mlp_layer_types": nothing_or(list_of(TEXT)),
    "moe_norm_min": nothing_or(_EPS),
    "clip_qkv": nothing_or(_FACTOR),
    "decoder_sparse_step": whole(1),
    **dict.fromkeys(("mlp_only_layers", "moe_layers"), nothing_or(list_of(whole(0)))),
    "full_attn_idxs": nothing_or(list_of(whole(0))),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), _COUNT),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), _SIZE),
    **dict.fromkeys(("linear_conv_kernel_dim", "conv_L_cache"), whole(2, 64)),
    "sliding_window": nothing_or(whole(0)),
    "max_window_layers": nothing_or(whole(0)),
    "attention_chunk_size": nothing_or(_SIZE),
    "floor_scale": _SIZE,
    **dict.fromkeys(("interleave_moe_layer_step", "no_rope_layer_interval"), whole(1)),
    "layer_types": nothing_or(list_of(TEXT)),
    "no_rope_layers": nothing_or(list_of(either(SWITCH, whole(0, 1)))),
    "rms_norm_eps": _EPS,
    "norm_eps": _EPS,
    "layer_norm_eps": _EPS,
    "norm_epsilon": _EPS,
    "rope_theta": nothing_or(either(_FACTOR, list_of(_FACTOR))),
    "partial_rotary_factors": nothing_or(list_of(_FACTOR)),
    **dict.fromkeys(
        ("swiglu_limits", "swiglu_limits_shared"), nothing_or(list_of(nothing_or(_LIMIT)))
    ),
    "rope_local_base_freq": nothing_or(_FACTOR),
    "partial_rotary_factor": nothing_or(_FACTOR),
    "rotary_pct": nothing_or(_FACTOR),
    **dict.fromkeys(
        (
            "embedding_multiplier",
            "attention_multiplier",
            "residual_multiplier",
            "logits_scaling",
            "query_pre_attn_scalar",
            "router_scaling_factor",
            "moe_routed_scaling_factor",
            "moe_router_scaling_factor",
            "moe_router_logit_softcapping",
            "attn_scale",
        ),
        _FACTOR,
    ),
    **dict.fromkeys(("routed_scaling_factor", "attention_value_scale"), nothing_or(_FACTOR)),
    "attn_logit_softcapping": nothing_or(_FACTOR),
    "final_logit_softcapping": nothing_or(_FACTOR),
    "hidden_act": nothing_or(TEXT),
    "hidden_activation": nothing_or(TEXT),
    "activation_function": nothing_or(TEXT),
    **dict.fromkeys(
        (
            "attention_bias",
            "attention_out_bias",
            "attention_k_eq_v",
            "enable_moe_block",
            "use_qk_norm",
            "use_expert_bias",
            "conv_bias",
            "block_auto_adjust_ff_dim",
            "mlp_bias",
            "qkv_bias",
            "use_bias",
            "enable_bias",
            "tie_word_embeddings",
            "use_sliding_window",
            "use_parallel_residual",
            "norm_topk_prob",
            "do_layer_norm_before",
            "layer_norm_elementwise_affine",
            _TUNING,
        ),
        nothing_or(SWITCH),
    ),
    **SPECIAL_TOKENS,
}


def as_transformers_5(config: Mapping[str, Any]) -> dict[str, Any]:
    """A model's config, or one in it, with what transformers 4 wrote as transformers 5 takes it."""
    found = {
        k: as_transformers_5(v) if k == "text_config" and isinstance(v, dict) else v
        for k, v in config.items()
    }
    if type(value := found.get(_TUNING)) is int and value >= 0:  # a number of it was 4, always
        found[_TUNING] = value > 0
    return found


def check_fields(config: Mapping[str, Any]) -> None:
    """Raise UnsupportedModelError, naming it, for a field that no model of a family has like that.

    For `config.json`, or what transformers made of it.
    """
    key = first_wrong(config, FIELDS)
    if key is not None:
        raise unsupported(key, config[key], FIELDS[key].words)


def check_counts(config: Mapping[str, Any], prefix: str = "", layers: int = _MANY) -> None:
    """Raise UnsupportedModelError for a number that no model has, of layers or experts above all.

    Also in a part of the config, such as `text_config`, and for architectures whose fields have
    other names. layers: the most that there can be; a model has a tensor for each at least.
    """
    for name, value in config.items():
        most = _MANY if "expert" in str(name) or "block" in str(name) else 1 << 53
        if "layer" in str(name) and "per_layer" not in str(name):
            most = min(layers, _MANY)
        if type(value) is int and abs(value) > most:
            raise unsupported(f"{prefix}{name}", value, f"up to {most}, as this model has tensors")
        if isinstance(value, dict) and name != "quantization_config":
            check_counts(value, f"{prefix}{name}.", layers)
