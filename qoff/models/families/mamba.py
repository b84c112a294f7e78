"""Families most of whose layers are Mamba 2: Granite 4, Bamba, Nemotron H and 3."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from qoff.models.spec_parts import MambaSpec, unsupported

from .experts import GRANITE_SHARED
from .family import Family, Fields, TensorNames, biases, mixture
from .llama import granite

_NO_LIMIT = (0.0, float("inf"))


def _spec(config: Any, layers: Sequence[bool]) -> MambaSpec | None:
    """By the names that most configs have. layers: that are Mamba."""
    if getattr(config, "mamba_proj_bias", False):
        raise unsupported("mamba_proj_bias", True, "false")
    limit = config.time_step_limit or _NO_LIMIT
    if tuple(limit) != _NO_LIMIT:
        raise unsupported("time_step_limit", limit, "0 to infinity")
    if not any(layers):
        return None
    return MambaSpec(
        heads=config.mamba_n_heads,
        head_dim=config.mamba_d_head,
        groups=config.mamba_n_groups,
        state=config.mamba_d_state,
        taps=config.mamba_d_conv,
        conv_bias=bool(config.mamba_conv_bias),
        layers=tuple(layers),
    )


def _kinds(config: Any, known: Sequence[str]) -> list[str]:
    """Of layers."""
    for kind in config.layers_block_type:
        if kind not in known:
            raise unsupported("layer_types", kind, ", ".join(known))
    return list(config.layers_block_type)


def _granite(config: Any) -> Fields:
    """Granite's factors; an MLP for all tokens, with or without experts beside it."""
    if config.hidden_act != "silu":  # of convolutions, too
        raise unsupported("hidden_act", config.hidden_act, "silu")
    kinds = _kinds(config, ("linear_attention", "full_attention"))
    found = {
        **granite(config),
        "intermediate_size": config.shared_intermediate_size,
        "recurrent": _spec(config, [kind == "linear_attention" for kind in kinds]),
        "rope_layers": (config.position_embedding_type == "rope",) * config.num_hidden_layers,
    }
    if config.num_local_experts:
        scale = float(config.residual_multiplier)
        found["experts"] = mixture(
            config, shares="topk", normalized=False, scale=scale,
            shared_size=config.shared_intermediate_size,
        )  # fmt: skip
    return found


def _bamba(config: Any) -> Fields:
    """Llama with a part of each head rotated."""
    if config.hidden_act != "silu":
        raise unsupported("hidden_act", config.hidden_act, "silu")
    kinds = _kinds(config, ("linear_attention", "full_attention"))
    return {
        **biases(config.attention_bias, config.mlp_bias),
        "recurrent": _spec(config, [kind == "linear_attention" for kind in kinds]),
    }


FAMILIES = {
    "granitemoehybrid": Family(
        "Granite 4 Micro, H-Micro, H-Tiny and H-Small",
        _granite,
        replace(
            GRANITE_SHARED,
            modules={
                **GRANITE_SHARED.modules,
                "mlp.gate_up_proj": "shared_mlp.input_linear",
                "mlp.down_proj": "shared_mlp.output_linear",
            },
        ),
    ),
    "bamba": Family(
        "Bamba 9B",
        _bamba,
        TensorNames(
            modules={"mlp": "feed_forward", "post_attention_layernorm": "pre_ff_layernorm"},
            norm="model.final_layernorm",
        ),
    ),
}
