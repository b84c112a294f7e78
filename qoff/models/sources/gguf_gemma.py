"""Gemma 3n and 4 in GGUF. Heads of Gemma 4 differ between kinds of layers, in one a part turns."""

from __future__ import annotations

from statistics import NormalDist
from typing import Any

import numpy as np

from qoff.errors import FormatError, UnsupportedModelError
from qoff.schema import shown

from .gguf_fields import (
    FULL,
    SLIDING,
    Config,
    attention_bias,
    common,
    dense,
    rms,
    two_ropes,
    windows,
)
from .gguf_metadata import Metadata
from .gguf_rope import LLAMA3

_LAYER_MODULES = {
    "per_layer.gate": "inp_gate",
    "per_layer.projection": "proj",
    "per_layer.post_norm": "post_norm",
}
GEMMA3N_MODULES = {
    **_LAYER_MODULES,
    "streams.router": "altup_router",
    "streams.router_norm": "altup_router_norm",
    "streams.prediction": "altup_predict_coef",
    "streams.correction": "altup_correct_coef",
    "streams.scale": "altup_correct_scale",
    "laurel.left": "laurel_l",
    "laurel.right": "laurel_r",
    "laurel.post_norm": "laurel_post_norm",
}
MODULES = {
    **_LAYER_MODULES,
    "mlp.routing_norm.weight": "ffn_gate_inp.scale",
    "mlp.router.gains": "ffn_down_exps.scale",
    "mlp.routed_norm": "pre_ffw_norm_2",
    "mlp.dense_norm": "post_ffw_norm_1",
    "mlp.mixture_norm": "post_ffw_norm_2",
    "layer_scale": "layer_output_scale.weight",
}
PER_LAYER = (
    "per_layer_token_embd.weight",
    "per_layer_model_proj.weight",
    "per_layer_proj_norm.weight",
)
STREAMS = ("altup_proj.weight", "altup_unembd_proj.weight")  # of all streams each
_KV_HEADS = "attention.head_count_kv"
_STAYS = 1e29  # a frequency divided by more


def base(metadata: Metadata) -> Config:
    """What all architectures have; lengths of heads are those of layers without a window."""
    full = metadata.need("attention.key_length")
    local = metadata.get("attention.key_length_swa", full)
    for key, size in (("attention.value_length", full), ("attention.value_length_swa", local)):
        metadata.only(key, size)
    metadata.only("rope.dimension_count", full)
    metadata.only("rope.dimension_count_swa", local)
    kinds = windows(metadata, metadata.layers, 6, 0)["layer_types"]
    slides = [kind == SLIDING for kind in kinds]
    heads, full_heads = _kv_heads(metadata, slides)
    inner, twice = _widths(metadata)
    return {
        **common(metadata, False, local, _ropes(metadata, full), heads, inner),
        "use_double_wide_mlp": twice,
        "global_head_dim": full,
        "num_global_key_value_heads": full_heads,
    }


def gemma4(metadata: Metadata, config: Config) -> Config:
    """V are K where no layer without a window has a matrix."""
    found = windows(metadata, metadata.layers, 6, 0)
    full = [i for i, kind in enumerate(found["layer_types"]) if kind == FULL]
    experts: Config = {"enable_moe_block": False}
    if metadata.get("expert_count", 0):
        experts = {
            "enable_moe_block": True,
            "num_experts": metadata.need("expert_count"),
            "top_k_experts": metadata.need("expert_used_count"),
            "moe_intermediate_size": metadata.need("expert_feed_forward_length"),
        }
    width = metadata.get("embedding_length_per_layer_input", 0)
    table: Config = {"hidden_size_per_layer_input": width}
    if width:
        table["vocab_size_per_layer_input"] = metadata.shape(PER_LAYER[0])[0]
    return {
        **rms(metadata),
        **found,
        **experts,
        **table,
        "attention_bias": attention_bias(metadata),
        "attention_k_eq_v": not any(metadata.has(f"blk.{i}.attn_v.weight") for i in full),
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": metadata.get("final_logit_softcapping") or None,
        "num_kv_shared_layers": metadata.get("attention.shared_kv_layers", 0),
    }


def gemma3n(metadata: Metadata, config: Config) -> Config:
    """Where gates are cut off is there as numbers of standard deviations above their mean."""
    metadata.only("altup.active_idx", 0)
    cuts = metadata.get("activation_sparsity_scale")
    if cuts is not None:
        cuts = [round(NormalDist().cdf(float(cut)), 6) for cut in cuts.tolist()]
    return {
        **dense(metadata),
        **windows(metadata, metadata.layers, 5, 512),
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": metadata.get("final_logit_softcapping", 30.0),
        "num_kv_shared_layers": metadata.get("attention.shared_kv_layers", 0),
        "hidden_size_per_layer_input": metadata.need("embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": metadata.shape(PER_LAYER[0])[0],
        "altup_num_inputs": metadata.need("altup.num_inputs"),
        "laurel_rank": metadata.shape("blk.0.laurel_l.weight")[0],
        "activation_sparsity_pattern": cuts,
        "rope_parameters": two_ropes(metadata, config["rope_parameters"]),
    }


def _widths(metadata: Metadata) -> tuple[int, bool]:
    """How wide MLPs are, and whether those of layers with others' keys are twice as wide."""
    key = f"{metadata.architecture}.feed_forward_length"
    found = metadata.values.get(key)
    shared = metadata.get("attention.shared_kv_layers", 0)
    if not isinstance(found, np.ndarray) or not shared or len(set(found.tolist())) < 2:
        return metadata.need("feed_forward_length"), False
    widths = [int(x) for x in found.tolist()]
    one, own = widths[0], metadata.layers - shared
    if widths != [one] * own + [2 * one] * shared:
        raise UnsupportedModelError(
            f"{metadata.path}: {key} is {shown(widths)}; supported: one number, or twice as much "
            f"in the last {shared} layers, which share keys and values"
        )
    return one, True


def _kv_heads(metadata: Metadata, slides: list[bool]) -> tuple[int, int]:
    """KV heads of layers with a window, and of those without: one number, or one for each layer."""
    key = f"{metadata.architecture}.{_KV_HEADS}"
    found = metadata.values.get(key)
    if not isinstance(found, np.ndarray):
        count = metadata.need(_KV_HEADS)
        return count, count
    counts = [int(x) for x in found.tolist()]
    if len(counts) != len(slides):
        raise FormatError(
            f"{metadata.path}: {key} has {len(counts)} entries for {len(slides)} layers"
        )
    kinds = [
        {n for n, x in zip(counts, slides, strict=True) if x == kind} for kind in (True, False)
    ]
    if any(len(kind) > 1 for kind in kinds):
        raise UnsupportedModelError(
            f"{metadata.path}: {key} is {counts}; supported: the same in all layers with a window, "
            "and in all without"
        )
    local, full = (next(iter(kind), counts[0]) for kind in kinds)
    return local, full


def _ropes(metadata: Metadata, full: int) -> dict[str, Any]:
    """Frequencies that are divided by 1 rotate; others are divided by so much that they do not."""
    factors = metadata.vector(LLAMA3)
    turned = sum(factor == 1 for factor in factors)
    stays = all(factor == 1 for factor in factors[:turned]) and min(
        factors[turned:], default=_STAYS
    )
    if len(factors) != full // 2 or stays < _STAYS:
        found = sorted(set(factors))[:4]
        raise UnsupportedModelError(
            f"{metadata.path}: tensor {LLAMA3} has {len(factors)} numbers, {found} among them; "
            f"supported: {full // 2}, some of 1 and the others of 1e30"
        )
    own = {
        "rope_type": "proportional",
        "partial_rotary_factor": 2 * turned / full,
        "rope_theta": float(metadata.get("rope.freq_base", 1000000.0)),
    }
    return two_ropes(metadata, own)
