"""MiMo V2 Flash in GGUF: layers with a window have twice the KV heads, and a RoPE of their own."""

from __future__ import annotations

from qoff.errors import FormatError, UnsupportedModelError

from .gguf_experts import SIGMOID, mixture
from .gguf_fields import FULL, SLIDING, Config, attention_bias, by_kind, common, rms, two_ropes
from .gguf_fields import windows as windows_of
from .gguf_metadata import Metadata
from .gguf_rope import rope_parameters

_KV_HEADS = "attention.head_count_kv"


def base(metadata: Metadata) -> Config:
    """What all architectures have; the same part of each head turns in all layers."""
    head_dim = int(metadata.need("attention.key_length"))
    full = rope_parameters(metadata, head_dim, partial=True)
    ropes = two_ropes(metadata, full, full["rope_theta"])
    ropes[SLIDING]["partial_rotary_factor"] = full["partial_rotary_factor"]
    return {
        **common(metadata, False, head_dim, ropes, _kv_heads(metadata)),
        "v_head_dim": metadata.need("attention.value_length"),
    }


def mimo(metadata: Metadata, config: Config) -> Config:
    """Experts in some layers. What does not say how V are scaled is of a model with the default.

    The first files do not: their converter left the factor out, as llama.cpp did.
    """
    metadata.only("expert_weights_norm", True)
    experts = [metadata.has(f"blk.{i}.ffn_gate_inp.weight") for i in range(metadata.layers)]
    scale = metadata.get("attention.value_scale")
    return {
        **rms(metadata),
        **_windows(metadata),
        **mixture(metadata, "n_routed_experts", SIGMOID, scaled=True),
        "mlp_layer_types": ["sparse" if here else "dense" for here in experts],
        "moe_intermediate_size": metadata.need("expert_feed_forward_length"),
        "routed_scaling_factor": float(metadata.get("expert_weights_scale") or 1.0),
        "attention_bias": attention_bias(metadata),
        **({} if scale is None else {"attention_value_scale": scale}),
    }


def _windows(metadata: Metadata) -> Config:
    """A file counts what a token sees before it, as the model's first config; here it counts, too.

    Raises FormatError where layers with a window have no attention sinks, or others have some.
    """
    found = windows_of(metadata, metadata.layers, 0, 0)
    if "sliding_window" in found:
        found["sliding_window"] += 1
    for layer, kind in enumerate(found["layer_types"]):
        name = f"blk.{layer}.attn_sinks.weight"
        if metadata.has(name) != (kind == SLIDING):
            wanted = "with" if kind == SLIDING else "without"
            raise FormatError(
                f"{metadata.path}: layer {layer} is one {wanted} a window; expected it {wanted} "
                f"tensor {name}"
            )
    return found


def _kv_heads(metadata: Metadata) -> int:
    """Those of layers without a window. Raises UnsupportedModelError where others have not twice
    as many."""
    heads = by_kind(metadata, _KV_HEADS)
    local = heads.get(SLIDING, 2 * heads.get(FULL, 0))
    if heads.get(FULL, local // 2) * 2 != local:
        raise UnsupportedModelError(
            f"{metadata.path}: {metadata.architecture}.{_KV_HEADS} is {local} in layers with a "
            f"window; supported: {2 * heads.get(FULL, local // 2)}, twice that of the others"
        )
    return local // 2
