"""Step 3.5 in GGUF: layers with a window have other heads, and a RoPE of their own."""

from __future__ import annotations

import numpy as np

from qoff.errors import FormatError
from qoff.schema import shown

from .gguf_experts import SIGMOID, mixture
from .gguf_fields import (
    FULL,
    SLIDING,
    Config,
    attention_bias,
    by_kind,
    common,
    rms,
    two_ropes,
    windows,
)
from .gguf_metadata import Metadata
from .gguf_rope import rope_parameters

MODULES = {"self_attn.gate_proj": "attn_gate"}


def base(metadata: Metadata) -> Config:
    """What all architectures have; of layers without a window half of each head turns."""
    head_dim = int(metadata.need("attention.key_length"))
    for key in ("attention.value_length", "rope.dimension_count", "rope.dimension_count_swa"):
        metadata.only(key, head_dim)
    heads = by_kind(metadata, "attention.head_count")
    full = rope_parameters(metadata, head_dim, partial=True, dim=head_dim // 2)
    ropes = two_ropes(metadata, full, full["rope_theta"])
    return {
        **common(metadata, False, head_dim, ropes, heads=heads.get(FULL) or heads[SLIDING]),
        "num_sliding_attention_heads": heads.get(SLIDING) or heads[FULL],
    }


def step(metadata: Metadata, config: Config) -> Config:
    """Experts in some layers; limits of 0 are none."""
    metadata.need("expert_weights_norm")
    metadata.only("expert_weights_norm", True)
    inner = metadata.need("expert_feed_forward_length")
    experts = [metadata.has(f"blk.{i}.ffn_gate_inp.weight") for i in range(metadata.layers)]
    return {
        **rms(metadata),
        **windows(metadata, metadata.layers, 0, 0),
        **mixture(metadata, "n_routed_experts", SIGMOID, scaled=True),
        "mlp_layer_types": ["sparse" if here else "dense" for here in experts],
        "moe_intermediate_size": inner,
        "share_expert_dim": metadata.get("expert_shared_feed_forward_length", 0),
        "moe_router_scaling_factor": float(metadata.get("expert_weights_scale") or 1.0),
        "attention_bias": attention_bias(metadata),
        "swiglu_limits": _limits(metadata, "swiglu_clamp_exp"),
        "swiglu_limits_shared": _limits(metadata, "swiglu_clamp_shexp"),
    }


def _limits(metadata: Metadata, key: str) -> list[float] | None:
    """Those of gate and up of each layer; None: a file says nothing."""
    found = metadata.get(key)
    if found is None:
        return None
    each = found.tolist() if isinstance(found, np.ndarray) else [found] * metadata.layers
    each = each[: metadata.layers] if len(each) == metadata.blocks else each
    if len(each) != metadata.layers or min(each) < 0:
        raise FormatError(
            f"{metadata.path}: {metadata.architecture}.{key} is {shown(each)}; expected a limit "
            f"for each of {metadata.layers} layers, 0 for none"
        )
    return [float(str(np.float32(limit))) for limit in each]
