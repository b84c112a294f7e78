"""Short convolutions in GGUF files: LFM2. Layers that convolve have no KV heads."""

from __future__ import annotations

from .gguf_experts import mixture
from .gguf_fields import Config, by_layer, common
from .gguf_metadata import Metadata

_KV_HEADS = "attention.head_count_kv"
_SIGMOID = 2  # of `expert_gating_func`


def base(metadata: Metadata) -> Config:
    """What all have; and which layers convolve."""
    heads = by_layer(metadata, _KV_HEADS)
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
