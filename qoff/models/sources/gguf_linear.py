"""Linear attention in GGUF files: Qwen3-Next and Qwen 3.5.

Files of Qwen 3.5 have value heads in another order than Hugging Face's: the first of each key head,
then the second of each, and so on. This is the order of rows of what makes values, and of columns
of what multiplies them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qoff.errors import FormatError

from .gguf_experts import mixture, qwen3_moe
from .gguf_fields import Config, common, dense, rms
from .gguf_metadata import Metadata

MODULES = {
    "post_attention_layernorm": "post_attention_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
}
_RECURRENT = "attention.recurrent_layers"
_SHARED = "expert_shared_feed_forward_length"


def qwen3_next(metadata: Metadata, config: Config) -> Config:
    shared = metadata.get(_SHARED, config["intermediate_size"])
    return {
        **qwen3_moe(metadata, config),
        **_delta(metadata, config),
        "shared_expert_intermediate_size": shared,
    }


def qwen3_5(metadata: Metadata, config: Config) -> Config:
    return {**dense(metadata), **_delta(metadata, config)}


def qwen3_5_moe(metadata: Metadata, config: Config) -> Config:
    """Weights of experts are always divided by their sum."""
    metadata.only("expert_weights_norm", True)
    return {
        **rms(metadata),
        **mixture(metadata, "num_experts"),
        **_delta(metadata, config),
        "moe_intermediate_size": metadata.need("expert_feed_forward_length"),
        "shared_expert_intermediate_size": metadata.need(_SHARED),
    }


def qwen3_5_moe_base(metadata: Metadata) -> Config:
    """What all have; no layer has an MLP of its own, whose size a file need not say."""
    inner = metadata.get("feed_forward_length") or metadata.need(_SHARED)
    return common(metadata, partial=True, inner=inner)


def _delta(metadata: Metadata, config: Config) -> Config:
    """Gated DeltaNet, and in which layers. Positions of texts have one dimension, not three."""
    layers, (keys, heads, size) = config["num_hidden_layers"], _heads(metadata)
    kinds = ["linear_attention" if x else "full_attention" for x in _recurrent(metadata, layers)]
    return {
        "attention_bias": any(metadata.has(f"blk.{i}.attn_q.bias") for i in range(layers)),
        "layer_types": kinds,
        "linear_conv_kernel_dim": metadata.need("ssm.conv_kernel"),
        "linear_key_head_dim": metadata.need("ssm.state_size"),
        "linear_value_head_dim": size,
        "linear_num_key_heads": keys,
        "linear_num_value_heads": heads,
    }


def _heads(metadata: Metadata) -> tuple[int, int, int]:
    """Key heads, value heads, and channels of a value head."""
    keys, heads = metadata.need("ssm.group_count"), metadata.need("ssm.time_step_rank")
    inner = metadata.need("ssm.inner_size")
    for key, found, of in (("inner_size", inner, heads), ("time_step_rank", heads, keys)):
        if found % of:
            raise FormatError(
                f"{metadata.path}: {metadata.architecture}.ssm.{key} is {found}; expected a "
                f"multiple of {of} heads"
            )
    return keys, heads, inner // heads


def _recurrent(metadata: Metadata, layers: int) -> list[bool]:
    """Which layers do not attend: a list of all, those that predict further tokens included."""
    key = f"{metadata.architecture}.{_RECURRENT}"
    found: Any = metadata.values.get(key)
    if found is None:
        interval = metadata.get("full_attention_interval", 4)
        return [(i + 1) % interval != 0 for i in range(layers)]
    if not isinstance(found, np.ndarray) or len(found) < layers:
        raise FormatError(f"{metadata.path}: {key} is no list with an entry for {layers} layers")
    return [bool(x) for x in found[:layers]]


class TiledHeads:
    """Where value heads lie in a file of Qwen 3.5."""

    def __init__(self, metadata: Metadata) -> None:
        self._keys, self._heads, self._size = _heads(metadata)
        self._before = 2 * self._keys * int(metadata.need("ssm.state_size"))

    def rows(self, name: str) -> Tensor | None:
        """The rows of a tensor, int64, in Hugging Face's order; None: they have that."""
        kinds: dict[str, Callable[[], Tensor]] = {
            **dict.fromkeys(("ssm_beta.weight", "ssm_alpha.weight"), lambda: self._order(1)),
            **dict.fromkeys(("ssm_a", "ssm_dt.bias"), lambda: self._order(1)),
            **dict.fromkeys(("attn_qkv.weight", "ssm_conv1d.weight"), self._behind_keys),
            "attn_gate.weight": lambda: self._order(self._size),
        }
        found = kinds.get(_kind(name))
        return None if found is None else found()

    def columns(self, name: str) -> Tensor | None:
        """The same of its columns."""
        return self._order(self._size) if _kind(name) == "ssm_out.weight" else None

    def _order(self, size: int) -> Tensor:
        """`size` rows of each head."""
        stored = torch.arange(self._heads * size).view(-1, self._keys, size)
        return stored.transpose(0, 1).flatten()

    def _behind_keys(self) -> Tensor:
        """Queries and keys, then values."""
        return torch.cat((torch.arange(self._before), self._before + self._order(self._size)))


def _kind(name: str) -> str:
    """What a tensor of a layer is called there."""
    return name.split(".", 2)[-1] if name.startswith("blk.") else ""
