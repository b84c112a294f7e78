"""Ling 3: most layers have KDA, others latent attention with gates of heads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from qoff.models.spec_parts import unsupported
from qoff.schema import is_number

from .corrected import NAMES
from .family import Config, Family, Fields, Has, TensorNames, layers_with, rope_of
from .kimi import DELTA_MODULES, kimi_delta
from .latent import latent_attention


def _bailing_hybrid(config: Any) -> Fields:
    """DeepSeek V3's experts and attention; what forgets may have a least logarithm."""
    rope = dict(config.rope_parameters)
    if rope.get("rope_type") == "default":
        rope.pop("partial_rotary_factor", None)  # `qk_rope_head_dim` says so
    return {
        **latent_attention(config, rope),
        **kimi_delta(config, floor=_floor(config)),
        "rope": rope_of(config, rope, config.qk_rope_head_dim),
        "rope_layers": (True,) * config.num_hidden_layers,
        "gated_attention": True,
        "head_gates": True,
    }


def _floor(config: Any) -> float:
    """The least logarithm of what remains of a state; 0: there is none."""
    least = config.kda_lower_bound
    if not config.kda_safe_gate:
        return 0.0
    if not is_number(least) or not least < 0:
        raise unsupported("kda_lower_bound", least, "a number below 0")
    return float(least)


def _converted(config: Config, has: Has) -> tuple[dict[str, Any], TensorNames]:
    """As transformers calls its modules, or as published.

    Either kind of layer has the matrix of its output under one name or the other.
    """
    if any(layers_with(has, "self_attn.forget_gate.A_log")):
        return dict(config), _OWN
    modules = dict(_PUBLISHED.modules)
    for module, mark in (
        ("linear_attn.out_proj", "A_log"),
        ("self_attn.o_proj", "kv_b_proj.weight"),
    ):
        for layer in layers_with(has, f"attention.{mark}"):
            if has(f"{layer}attention.o_proj.weight"):
                modules[module] = "attention.o_proj"
    return dict(config), replace(_PUBLISHED, modules=modules)


_FORGETS = ("f_proj", "A_log", "dt_bias")
_OWN = replace(
    NAMES,
    modules={
        **NAMES.modules,
        **DELTA_MODULES,
        **{f"linear_attn.{name}": f"self_attn.forget_gate.{name}" for name in _FORGETS},
        "self_attn.gate_proj": "self_attn.g_proj",
    },
    rope_pairs=True,
    split_gates=True,
)
_PUBLISHED = replace(
    _OWN,
    modules={
        **NAMES.modules,
        "mlp.router.correction": "mlp.gate.expert_bias",
        "self_attn": "attention",
        "self_attn.gate_proj": "attention.g_proj",
        "self_attn.o_proj": "attention.dense",
        "linear_attn": "attention",
        "linear_attn.norm": "attention.o_norm",
        "linear_attn.out_proj": "attention.dense",
    },
    embedding="model.word_embeddings.weight",
    split_conv=True,
)
# transformers joins the convolutions of a file when it loads it.
_LOADED = replace(_PUBLISHED, split_conv=False)
FAMILIES = {
    "bailing_hybrid": Family("Ling 3.0 Flash", _bailing_hybrid, _LOADED, _converted, _OWN),
}
