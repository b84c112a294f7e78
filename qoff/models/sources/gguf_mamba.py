"""Mamba 2 in GGUF files: Granite 4, Nemotron H and 3, Falcon H1.

Layers of Mamba have no KV heads, but for those of Falcon H1, which attend, too. What those of
Nemotron are, their tensors say.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qoff.errors import FormatError
from qoff.models.families.mamba import NEMOTRON_SIZES, SIZES

from .gguf_experts import SIGMOID, groups, mixture
from .gguf_fields import Config, attention_bias, by_layer, common, has_bias, rms, scales
from .gguf_metadata import Metadata

MODULES = {
    "mamba.in_proj": "ssm_in",
    "mamba.conv1d": "ssm_conv1d",
    "mamba.A_log": "ssm_a",
    "mamba.dt_bias": "ssm_dt.bias",
    "mamba.D": "ssm_d",
    "mamba.norm": "ssm_norm",
    "mamba.out_proj": "ssm_out",
}
NEMOTRON_MODULES = {
    **MODULES,
    "post_attention_layernorm": "attn_norm",
    "mlp.latent_in": "ffn_latent_down",
    "mlp.latent_out": "ffn_latent_up",
}
_KV_HEADS = "attention.head_count_kv"
_KINDS = {  # of layers of Nemotron, by a tensor that they have; a mixture may have one like an MLP
    "ffn_gate_inp": "moe",
    "ffn_up": "mlp",
    "attn_q": "full_attention",
    "ssm_in": "linear_attention",
}
_SHARED = "expert_shared_feed_forward_length"
_ROPE = "rope.scaling.finetuned"  # whether there is one


def granite_base(metadata: Metadata) -> Config:
    """What all have, which layers attend, and sizes of the others."""
    heads = by_layer(metadata, _KV_HEADS)
    (inner, sizes), hidden = _mamba(metadata), metadata.need("embedding_length")
    if inner % hidden:
        raise FormatError(
            f"{metadata.path}: {metadata.architecture}.ssm.inner_size is {inner}; expected a "
            f"multiple of the embedding's {hidden}"
        )
    return {
        **common(metadata, kv_heads=max(heads)),
        "rms_norm_eps": metadata.need("attention.layer_norm_rms_epsilon"),
        "layer_types": ["full_attention" if x else "linear_attention" for x in heads],
        "mamba_expand": inner // hidden,
        **_by_keys(sizes, SIZES),
    }


def granite(metadata: Metadata, config: Config) -> Config:
    """An MLP for all tokens, or experts beside it."""
    found: Config = {
        **scales(metadata, config, any_rope=True),
        "attention_bias": False,
        "position_embedding_type": "rope" if metadata.get(_ROPE, True) else None,
        "shared_intermediate_size": config["intermediate_size"],
        "num_local_experts": 0,
    }
    if metadata.get("expert_count", 0):
        found |= mixture(metadata, "num_local_experts")
        found["shared_intermediate_size"] = metadata.need(_SHARED)
    return found


def falcon_h1(metadata: Metadata, config: Config) -> Config:
    """Sizes of Mamba; the model's constants are in its matrices."""
    inner, sizes = _mamba(metadata)
    return {
        **rms(metadata),
        "attention_bias": attention_bias(metadata),
        "mlp_bias": has_bias(metadata, "ffn_up"),
        "mamba_d_ssm": inner,
        "mamba_rms_norm": metadata.has("blk.0.ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        **_by_keys(sizes, SIZES),
    }


def nemotron_base(metadata: Metadata) -> Config:
    """What all have, what each layer is, and sizes of Mamba. There is no RoPE."""
    heads = by_layer(metadata, _KV_HEADS)
    kinds = [_kind(metadata, layer) for layer in range(metadata.layers)]
    if "mlp" in kinds:
        inner = metadata.shape(f"blk.{kinds.index('mlp')}.ffn_up.weight")[0]
    else:  # layers have experts, or a mixer
        inner = metadata.get("expert_feed_forward_length", 0) or metadata.need(_SHARED)
    _, sizes = _mamba(metadata)
    found = common(metadata, kv_heads=max(heads), inner=inner)
    del found["rope_parameters"]
    eps = metadata.get("attention.layer_norm_rms_epsilon")
    return {
        **found,
        "layer_norm_epsilon": eps or metadata.need("attention.layer_norm_epsilon"),
        "layers_block_type": kinds,
        "mlp_bias": any(metadata.has(f"blk.{i}.ffn_up.bias") for i in range(metadata.layers)),
        **_by_keys(sizes, NEMOTRON_SIZES),
    }


def nemotron(metadata: Metadata, config: Config) -> Config:
    metadata.only("expert_count", 0)
    return {}


def nemotron_moe(metadata: Metadata, config: Config) -> Config:
    """Experts, and one for all tokens beside them."""
    latent = metadata.get("moe_latent_size", 0)
    return {
        **mixture(metadata, "n_routed_experts", SIGMOID, scaled=True),
        **groups(metadata),
        "moe_intermediate_size": metadata.need("expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": metadata.need(_SHARED),
        "norm_topk_prob": metadata.get("expert_weights_norm", False),
        "routed_scaling_factor": float(metadata.get("expert_weights_scale") or 1.0),
        **({"moe_latent_size": latent} if latent else {}),
    }


def _kind(metadata: Metadata, layer: int) -> str:
    """What a layer of Nemotron is, by its tensors."""
    for tensor, kind in _KINDS.items():
        if metadata.has(f"blk.{layer}.{tensor}.weight"):
            return kind
    raise FormatError(
        f"{metadata.path}: layer {layer} has none of the tensors {', '.join(_KINDS)}; the file is "
        "damaged, get it again"
    )


def _by_keys(sizes: Mapping[str, Any], keys: Mapping[str, str]) -> Config:
    return {key: sizes[size] for size, key in keys.items()}


def _mamba(metadata: Metadata) -> tuple[int, dict[str, Any]]:
    """Channels of x, and sizes of a layer."""
    inner, heads = metadata.need("ssm.inner_size"), metadata.need("ssm.time_step_rank")
    if inner % heads:
        raise FormatError(
            f"{metadata.path}: {metadata.architecture}.ssm.inner_size is {inner}; expected a "
            f"multiple of {heads} heads"
        )
    layers = range(metadata.layers)
    first = next((i for i in layers if metadata.has(f"blk.{i}.ssm_in.weight")), 0)
    sizes = {
        "heads": heads,
        "head_dim": inner // heads,
        "groups": metadata.need("ssm.group_count"),
        "state": metadata.need("ssm.state_size"),
        "taps": metadata.need("ssm.conv_kernel"),
        "conv_bias": metadata.has(f"blk.{first}.ssm_conv1d.bias"),
    }
    return inner, sizes
