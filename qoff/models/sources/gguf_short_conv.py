"""Short convolutions in GGUF files: LFM2. Layers that convolve have no KV heads."""

from __future__ import annotations

from typing import Any

import numpy as np

from qoff.errors import FormatError
from qoff.schema import shown

from .gguf_experts import mixture
from .gguf_fields import Config, common
from .gguf_metadata import Metadata

_KV_HEADS = "attention.head_count_kv"
_SIGMOID = 2  # of `expert_gating_func`


def base(metadata: Metadata) -> Config:
    """What all have; and which layers convolve."""
    heads = _kv_heads(metadata)
    return {
        **common(metadata, kv_heads=max(heads)),
        "norm_eps": metadata.need("attention.layer_norm_rms_epsilon"),
        "layer_types": ["full_attention" if x else "conv" for x in heads],
        "conv_L_cache": metadata.need("shortconv.l_cache"),
    }


def lfm2(metadata: Metadata, config: Config) -> Config:
    """A file has the width that the MLP has."""
    metadata.only("expert_count", 0)
    metadata.only("attention.sliding_window", 0)
    return {"block_auto_adjust_ff_dim": False}


def lfm2_moe(metadata: Metadata, config: Config) -> Config:
    """Weights of experts are always divided by their sum."""
    metadata.only("expert_weights_norm", True)
    layers = range(config["num_hidden_layers"])
    return {
        **mixture(metadata, "num_experts", (_SIGMOID,), scaled=True),
        "moe_intermediate_size": metadata.need("expert_feed_forward_length"),
        "num_dense_layers": metadata.get("leading_dense_block_count", 0),
        "norm_topk_prob": True,
        "routed_scaling_factor": float(metadata.get("expert_weights_scale") or 1.0),
        "use_expert_bias": any(metadata.has(f"blk.{i}.exp_probs_b.bias") for i in layers),
    }


def _kv_heads(metadata: Metadata) -> list[int]:
    """KV heads of each layer: as many in all that attend, and none in others."""
    key = f"{metadata.architecture}.{_KV_HEADS}"
    found: Any = metadata.values.get(key)
    if not isinstance(found, np.ndarray):
        return [int(metadata.need(_KV_HEADS))] * metadata.layers
    heads = [int(x) for x in found] if found.dtype.kind in "iu" else []
    if len(heads) != metadata.layers or min(heads) < 0 or len({*heads} - {0}) != 1:
        raise FormatError(
            f"{metadata.path}: {key} is {shown(found.tolist())}; expected for each of "
            f"{metadata.layers} layers 0, or what others have"
        )
    return heads
