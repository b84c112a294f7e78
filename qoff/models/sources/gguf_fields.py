"""Fields of a `config.json` that many architectures of GGUF have alike."""

from __future__ import annotations

from typing import Any

import numpy as np

from qoff.errors import FormatError
from qoff.schema import shown

from .gguf_metadata import EMBEDDING, HEAD, Metadata
from .gguf_rope import rope_parameters

Config = dict[str, Any]
SLIDING, FULL = "sliding_attention", "full_attention"


def common(
    metadata: Metadata,
    partial: bool = False,
    head_dim: int | None = None,
    rope: Config | None = None,
    kv_heads: int | None = None,
    inner: int | None = None,
    heads: int | None = None,
) -> Config:
    """What all have. partial: a part of each head may turn. Others: where no key has them."""
    hidden = metadata.need("embedding_length")
    heads = heads or int(metadata.need("attention.head_count"))
    if head_dim is None:
        head_dim = int(metadata.get("attention.key_length", hidden // heads))
        metadata.only("attention.value_length", head_dim)
    return {
        "hidden_size": hidden,
        "intermediate_size": inner or metadata.need("feed_forward_length"),
        "num_hidden_layers": metadata.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads or metadata.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": metadata.need("context_length"),
        "vocab_size": metadata.shape(EMBEDDING)[0],
        "rope_parameters": rope or rope_parameters(metadata, head_dim, partial),
        "tie_word_embeddings": not metadata.has(HEAD),
        "bos_token_id": metadata.token("bos"),
        "eos_token_id": metadata.token("eos"),
        "pad_token_id": metadata.token("padding"),
    }


def dense(metadata: Metadata) -> Config:
    """RMSNorm, no experts; biases of attention where there are some."""
    metadata.only("expert_count", 0)
    return {**rms(metadata), "attention_bias": attention_bias(metadata)}


def rms(metadata: Metadata) -> Config:
    return {"rms_norm_eps": metadata.need("attention.layer_norm_rms_epsilon")}


def attention_bias(metadata: Metadata) -> bool:
    """Whether queries, keys and values have biases, fused or not."""
    return has_bias(metadata, "attn_q") or has_bias(metadata, "attn_qkv")


def has_bias(metadata: Metadata, module: str) -> bool:
    return metadata.has(f"blk.0.{module}.bias")


def windows(metadata: Metadata, layers: int, period: int, default: int) -> Config:
    """The sliding window, and in which layers it is: by their pattern, in all but every n-th."""
    window = metadata.get("attention.sliding_window", default)
    pattern = metadata.get("attention.sliding_window_pattern", period)
    if not isinstance(pattern, int):
        pattern = pattern[:layers] if len(pattern) == metadata.blocks else pattern
        if len(pattern) != layers:
            raise FormatError(
                f"{metadata.path}: {metadata.architecture}.attention.sliding_window_pattern has "
                f"{len(pattern)} entries for {layers} layers"
            )
        slides = [bool(x) for x in pattern]
    else:
        slides = [pattern == 0 or i % pattern < pattern - 1 for i in range(layers)]
    kinds = [SLIDING if window and slide else FULL for slide in slides]
    return {"layer_types": kinds, **({"sliding_window": window} if window else {})}


def by_kind(metadata: Metadata, key: str) -> dict[str, int]:
    """A number above 0 of each kind of layer that there is, of one for all or for each layer."""
    kinds = windows(metadata, metadata.layers, 0, 0)["layer_types"]
    full = f"{metadata.architecture}.{key}"
    found: Any = metadata.values.get(full)
    if not isinstance(found, np.ndarray):
        return dict.fromkeys(kinds, int(metadata.need(key)))
    each = found.tolist() if found.dtype.kind in "iu" else []
    each = each[: metadata.layers] if len(each) == metadata.blocks else each
    pairs = set(zip(kinds, each, strict=False))
    if len(each) != len(kinds) or len(pairs) != len({*kinds}) or min(each) < 1:
        raise FormatError(
            f"{metadata.path}: {full} is {shown(found.tolist())}; expected for each of "
            f"{metadata.layers} layers what others of its kind, with a window or without, have"
        )
    return dict(pairs)


def two_ropes(metadata: Metadata, full: Config, theta: float = 10000.0) -> Config:
    """RoPE of layers without a window; and with one, of base `theta` where no key says so."""
    local = float(metadata.get("rope.freq_base_swa", theta))
    return {FULL: full, SLIDING: {"rope_type": "default", "rope_theta": local}}


def scaled_queries(metadata: Metadata, positions: int) -> Config:
    """What `rope_parameters` say of queries that are scaled by position; nothing if none are."""
    if not (beta := metadata.get("attention.temperature_scale", 0.0)):
        return {}
    every = metadata.get("rope.scaling.original_context_length", positions)
    metadata.only("attention.temperature_length", every)
    return {"llama_4_scaling_beta": beta, "original_max_position_embeddings": every}


def stacked(metadata: Metadata) -> Any:
    """How experts lie in the first layer that has them."""
    names = metadata.tensors
    if any(name.endswith(".ffn_gate_up_exps.weight") for name in names):
        return "halves"
    return "rows" if any(name.endswith(".ffn_up_exps.weight") for name in names) else ""


def by_layer(metadata: Metadata, key: str) -> list[int]:
    """A size of each layer: 0, or what all others have."""
    full = f"{metadata.architecture}.{key}"
    found: Any = metadata.values.get(full)
    if not isinstance(found, np.ndarray):
        return [int(metadata.need(key))] * metadata.layers
    sizes = [int(x) for x in found] if found.dtype.kind in "iu" else []
    sizes = sizes[: metadata.layers] if len(sizes) == metadata.blocks else sizes
    if len(sizes) != metadata.layers or min(sizes) < 0 or len({*sizes} - {0}) != 1:
        raise FormatError(
            f"{metadata.path}: {full} is {shown(found.tolist())}; expected for each of "
            f"{metadata.layers} layers 0, or what others have"
        )
    return sizes


def scales(metadata: Metadata, config: Config, any_rope: bool = False) -> Config:
    """Granite's factors: one of 0 or none is none. any_rope: also without RoPE, or a factor."""
    if not any_rope:
        metadata.only("rope.scaling.finetuned", True)
        metadata.need("logit_scale")
    return {
        "embedding_multiplier": float(metadata.get("embedding_scale") or 1.0),
        "residual_multiplier": float(metadata.get("residual_scale") or 1.0),
        "attention_multiplier": float(
            metadata.get("attention.scale") or config["head_dim"] ** -0.5
        ),
        "logits_scaling": float(metadata.get("logit_scale", 1.0)),
    }
