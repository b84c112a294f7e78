"""Kimi Linear: most layers have KDA, others latent attention without RoPE."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from qoff.models.recurrent_spec import LinearSpec
from qoff.models.spec_parts import unsupported

from .corrected import NAMES, deepseek_experts
from .family import Config, Family, Fields, Has, TensorNames, layers_with
from .latent import latent_attention

_KINDS = ("linear_attention", "full_attention")


def _kimi_linear(config: Any) -> Fields:
    """DeepSeek V3's experts and attention, of which nothing rotates."""
    for key, wanted in (("mla_use_nope", True), ("moe_router_activation_func", "sigmoid")):
        if getattr(config, key, wanted) != wanted:
            raise unsupported(key, getattr(config, key), str(wanted).lower())
    return {
        **latent_attention(config, {}),
        **kimi_delta(config, rank=config.linear_head_dim),
        "rope": None,
        "rope_layers": (False,) * config.num_hidden_layers,
    }


def kimi_delta(config: Any, **more: Any) -> Fields:
    """KDA in the layers that are listed, and the experts of DeepSeek V3. more: of `LinearSpec`."""
    if config.hidden_act != "silu":  # of convolutions, too
        raise unsupported("hidden_act", config.hidden_act, "silu")
    for kind in config.layer_types:
        if kind not in _KINDS:
            raise unsupported("layer_types", kind, ", ".join(_KINDS))
    heads, dim = config.linear_num_heads, config.linear_head_dim
    layers = tuple(kind == "linear_attention" for kind in config.layer_types)
    sizes = {"key_heads": heads, "value_heads": heads, "key_dim": dim, "value_dim": dim}
    taps = config.linear_conv_kernel_dim
    experts = deepseek_experts(config, (kind == "sparse" for kind in config.mlp_layer_types))
    return {
        "recurrent": LinearSpec(**sizes, taps=taps, layers=layers, by_channel=True, **more)
        if any(layers)
        else None,
        "experts": experts if any(experts.layers) else None,
    }


def _converted(config: Config, has: Has) -> tuple[dict[str, Any], TensorNames]:
    """As published, as transformers calls its modules, or as it saves them.

    It saves MLPs as if they were experts.
    """

    if any(layers_with(has, "self_attn.forget_gate.A_log")):
        return dict(config), _OWN
    dense = any(layers_with(has, "block_sparse_moe.down_proj.weight"))
    return dict(config), _published("block_sparse_moe") if dense else _PUBLISHED


DELTA_MODULES = {
    "linear_attn": "self_attn",
    "linear_attn.norm": "self_attn.o_norm",
    "linear_attn.out_proj": "self_attn.o_proj",
}
_LEAVES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}  # of experts


def _published(dense: str) -> TensorNames:
    """dense: where the MLP is of layers without experts."""
    found = dict(DELTA_MODULES)
    for module, called in (
        ("mlp.router", "gate"),
        ("mlp.router.correction", "gate.e_score_correction_bias"),
        ("mlp.experts", "experts"),
    ):
        found[module] = f"block_sparse_moe.{called}"
    for leaf, short in _LEAVES.items():
        found[f"mlp.{short}"] = f"{dense}.{leaf}"
        found[f"mlp.shared_expert.{short}"] = f"block_sparse_moe.shared_experts.{leaf}"
    return TensorNames(modules=found, leaves=_LEAVES, split_conv=True)


_PUBLISHED = _published("mlp")
_FORGETS = ("f_a_proj", "f_b_proj", "A_log", "dt_bias")
_OWN = replace(
    NAMES,
    modules={
        **NAMES.modules,
        **DELTA_MODULES,
        **{f"linear_attn.{name}": f"self_attn.forget_gate.{name}" for name in _FORGETS},
    },
)
# transformers joins the convolutions of a file when it loads it.
_LOADED = replace(_PUBLISHED, split_conv=False)
FAMILIES = {
    "kimi_linear": Family("Kimi Linear 48B-A3B", _kimi_linear, _LOADED, _converted, _OWN),
}
