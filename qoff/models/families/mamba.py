"""Families whose layers are Mamba 2, most or all of them: Granite 4, Bamba, Nemotron, Falcon H1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from qoff.models.recurrent_spec import MambaSpec
from qoff.models.spec_parts import unsupported
from qoff.schema import is_number

from .corrected import deepseek_experts
from .experts import GRANITE_SHARED
from .family import (
    Config,
    Family,
    Fields,
    Has,
    TensorNames,
    activation,
    biases,
    head_dim_of,
    mixture,
    positive,
)
from .llama import granite

_NO_LIMIT = (0.0, float("inf"))
SIZES = {  # the keys of a config, of most and of Nemotron
    "heads": "mamba_n_heads",
    "head_dim": "mamba_d_head",
    "groups": "mamba_n_groups",
    "state": "mamba_d_state",
    "taps": "mamba_d_conv",
    "conv_bias": "mamba_conv_bias",
}
NEMOTRON_SIZES = {
    "heads": "mamba_num_heads",
    "head_dim": "mamba_head_dim",
    "groups": "n_groups",
    "state": "ssm_state_size",
    "taps": "conv_kernel",
    "conv_bias": "use_conv_bias",
}


def _spec(
    config: Any, layers: Sequence[bool], sizes: Mapping[str, str] = SIZES, **more: Any
) -> MambaSpec | None:
    """layers: that are Mamba. sizes: the keys of a config. more: other fields."""
    if not any(layers):
        return None
    if getattr(config, "mamba_proj_bias", False):
        raise unsupported("mamba_proj_bias", True, "false")
    limit = config.time_step_limit or _NO_LIMIT
    if tuple(limit) != _NO_LIMIT:
        raise unsupported("time_step_limit", limit, "0 to infinity")
    return MambaSpec(
        **{field: getattr(config, key) for field, key in sizes.items()},
        layers=tuple(layers),
        **more,
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


def _falcon_h1(config: Any) -> Fields:
    """Each layer has Mamba and attention side by side; constants multiply all parts.

    Those of the input of attention, of keys, and of the gate are in the scales of scores, of
    outputs, and of the norm before the MLP: silu(g x) * (g u) / g is silu(g x) * u.
    """
    wanted = {"hidden_act": "silu", "projectors_bias": False}
    if config.mamba_rms_norm:
        wanted["mamba_norm_before_gate"] = False
    for key, value in wanted.items():
        if getattr(config, key) != value:
            raise unsupported(key, getattr(config, key), str(value).lower())
    gate, down = _factors(config, "mlp_multipliers", 2)
    into, keys = (positive(config, f"{x}_multiplier") for x in ("attention_in", "key"))
    for key, bias, factor in (
        ("attention_in_multiplier", "attention_bias", into),
        ("mlp_multipliers", "mlp_bias", gate),
    ):
        if getattr(config, bias) and factor != 1:
            raise unsupported(f"{key} beside {bias}", getattr(config, key), "1")
    sections, before = _factors(config, "ssm_multipliers", 5), positive(config, "ssm_in_multiplier")
    return {
        **biases(config.attention_bias, config.mlp_bias),
        "embedding_scale": positive(config, "embedding_multiplier"),
        "attention_scale": head_dim_of(config) ** -0.5 * keys * into**2,
        "attention_output_scale": into * positive(config, "attention_out_multiplier"),
        "mlp_input_scale": gate,
        "mlp_output_scale": down / gate,
        "logit_scale": positive(config, "lm_head_multiplier"),
        "recurrent": _spec(
            config,
            [True] * config.num_hidden_layers,
            normed=config.mamba_rms_norm,
            factors=tuple(before * factor for factor in sections),
            scale=positive(config, "ssm_out_multiplier"),
            beside=True,
        ),
    }


def _factors(config: Any, key: str, count: int) -> list[float]:
    """So many numbers of a config that are divided by. Raises UnsupportedModelError."""
    found = getattr(config, key)
    if len(found) != count or not all(is_number(x) and x > 0 for x in found):
        raise unsupported(key, found, f"{count} numbers above 0")
    return [float(x) for x in found]


def _nemotron_h(config: Any) -> Fields:
    """Each layer has attention without RoPE, Mamba, an MLP or experts, none of them gated."""
    for key, wanted in (("use_bias", False), ("mamba_hidden_act", "silu")):
        if getattr(config, key) != wanted:
            raise unsupported(key, getattr(config, key), str(wanted).lower())
    kinds = _kinds(config, ("linear_attention", "full_attention", "mlp", "moe"))
    if "full_attention" not in kinds:
        raise unsupported("layers_block_type", kinds, "one that has full_attention")
    mlps = tuple(kind in ("mlp", "moe") for kind in kinds)
    act = activation(config.mlp_hidden_act)
    found = {
        "norm_eps": config.layer_norm_epsilon,
        "rope": None,  # whatever a config has
        "rope_layers": (False,) * config.num_hidden_layers,
        "gated": False,
        "activation": act,
        "mlp_bias": config.mlp_bias,
        "recurrent": _spec(config, [kind == "linear_attention" for kind in kinds], NEMOTRON_SIZES),
        "mixers": tuple(not mlp for mlp in mlps),
        "mlps": mlps,
    }
    if "moe" not in kinds:
        return found
    if config.mlp_bias:  # of experts, too
        raise unsupported("mlp_bias", True, "false")
    experts = deepseek_experts(config, (kind == "moe" for kind in kinds))
    shared = config.moe_shared_expert_intermediate_size
    latent = config.moe_latent_size or 0
    experts = replace(experts, activation=act, gated=False, shared_size=shared, latent_size=latent)
    if "mlp" not in kinds:
        found["intermediate_size"] = shared
    return {**found, "experts": experts}


def _backbone(config: Config, has: Has) -> tuple[dict[str, Any], TensorNames]:
    """The source as it is published, or as transformers saves it."""
    if not has("backbone.embeddings.weight"):
        return dict(config), _NEMOTRON
    names = replace(
        _NEMOTRON,
        layer="backbone.layers.{}.",
        embedding="backbone.embeddings.weight",
        norm="backbone.norm_f",
    )
    return dict(config), names


_NEMOTRON = TensorNames(
    modules={
        "input_layernorm": "norm",
        "post_attention_layernorm": "norm",
        "self_attn": "mixer",
        "mamba": "mixer",
        "mlp": "mixer",
        "mlp.router": "mixer.gate",
        "mlp.router.correction": "mixer.gate.e_score_correction_bias",
        "mlp.shared_expert": "mixer.shared_experts",
        "mlp.latent_in": "mixer.fc1_latent_proj",
        "mlp.latent_out": "mixer.fc2_latent_proj",
    },
    embedding="model.embeddings.weight",
    norm="model.norm_f",
    stacked_experts="bare-halves",
)
_BAMBA = TensorNames(
    modules={"mlp": "feed_forward", "post_attention_layernorm": "pre_ff_layernorm"},
    norm="model.final_layernorm",
)
FAMILIES = {
    "nemotron_h": Family(
        "Nemotron 3 Nano, Super, Ultra; Nemotron H, Nano 2", _nemotron_h, _NEMOTRON, _backbone
    ),
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
    "bamba": Family("Bamba 9B", _bamba, _BAMBA),
    "falcon_h1": Family("Falcon H1 0.5B to 34B, Falcon H1R", _falcon_h1, _BAMBA),
}
