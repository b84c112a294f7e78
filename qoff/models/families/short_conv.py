"""Families most of whose layers are gated short convolutions: LFM2."""

from __future__ import annotations

from typing import Any

from qoff.models.recurrent_spec import ShortConvSpec
from qoff.models.spec_parts import unsupported

from .corrected import after
from .family import Family, Fields, TensorNames, mixture, positive

_KINDS = ("conv", "full_attention")


def _layers(config: Any) -> Fields:
    """Convolutions, or attention with norms of query and key heads."""
    if config.conv_bias:  # of the projections, too
        raise unsupported("conv_bias", config.conv_bias, "false")
    for kind in config.layer_types or [None]:
        if kind not in _KINDS:
            raise unsupported("layer_types", kind, ", ".join(_KINDS))
    layers = tuple(kind == "conv" for kind in config.layer_types)
    found = ShortConvSpec(config.hidden_size, config.conv_L_cache, layers) if any(layers) else None
    return {"norm_eps": config.norm_eps, "qk_norm": "head", "recurrent": found}


def _lfm2(config: Any) -> Fields:
    """The MLP may be narrower than `intermediate_size` says."""
    inner = config.intermediate_size
    if config.block_auto_adjust_ff_dim:
        inner = int(2 * inner / 3)
        inner = int(config.block_ffn_dim_multiplier * inner)
        unit = config.block_multiple_of
        inner = unit * ((inner + unit - 1) // unit)
    return {**_layers(config), "intermediate_size": inner}


def _lfm2_moe(config: Any) -> Fields:
    """Experts behind the first layers, chosen by sigmoids that may be corrected."""
    experts = mixture(
        config,
        after(config, config.num_dense_layers),
        shares="sigmoid",
        normalized=bool(config.norm_topk_prob),
        scale=positive(config, "routed_scaling_factor"),
        correction=bool(config.use_expert_bias),
    )
    return {**_layers(config), "experts": experts if any(experts.layers) else None}


_NAMES = TensorNames(
    modules={
        "input_layernorm": "operator_norm",
        "post_attention_layernorm": "ffn_norm",
        "short_conv": "conv",
        "mlp": "feed_forward",
        "mlp.router": "feed_forward.gate",
        "mlp.router.correction": "feed_forward.expert_bias",
        "self_attn.q_norm": "self_attn.q_layernorm",
        "self_attn.k_norm": "self_attn.k_layernorm",
        "self_attn.o_proj": "self_attn.out_proj",
    },
    leaves={"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"},
    norm="model.embedding_norm",
)
FAMILIES = {
    "lfm2": Family("LFM2 350M to 2.6B", _lfm2, _NAMES),
    "lfm2_moe": Family("LFM2 8B-A1B, 24B-A2B", _lfm2_moe, _NAMES),
}
