"""The shape of one layer's attention and the layout of its uncompressed cache.

Float32. V is `[sequences, kv_heads, capacity, value_dim]`. K is
`[sequences, kv_heads, capacity / 16, head_dim, 16]`: the scores of 16 keys are one vector, and a
decoding CPU needs no horizontal sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

KEYS_PER_VECTOR = 16
WIDEST = 256  # channels of heads whose keys and values a GPU has in registers whole
_Position = TypeVar("_Position", int, Tensor)


@dataclass(frozen=True)
class QueryScale:
    """A query at position p is multiplied by 1 + beta * log(1 + (p + ahead) // every), after RoPE.

    Scores of long contexts then stay as distinct as those of short ones (arXiv 2501.19399): Llama
    4's temperature with `ahead` 1, Ministral 3's with 0 (transformers `models/llama4`,
    `models/ministral3`).
    """

    beta: float
    every: int  # tokens
    ahead: int = 0

    def of(self, positions: Tensor) -> Tensor:
        """The factors of integer positions, float32."""
        return 1 + self.beta * torch.log1p(((positions + self.ahead) // self.every).float())


@dataclass(frozen=True)
class HeadShape:
    """What the attention of one layer looks like, the same for every call.

    chunked: windows are chunks, which begin at multiples of their size; a query sees what its own
    has before it. latent: 0, or V of a token are so many channels of its key (`latent_values`), and
    have no columns of their own; RoPE rotates the key's other channels, i of those in its lower
    half with i of those in its upper one. Multi-head latent attention, arXiv 2405.04434, is that
    with one KV head. norm_last: norms of query and key heads come after RoPE. value_norm: each
    value head has an RMSNorm without weights. indexes: its keys are those of an index
    (`layout.index`), and nothing attends to them. appends: without it there are queries alone, and
    the cache is another layer's, which appended keys and values of these tokens before.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float  # of the scores, usually head_dim ** -0.5
    window: int | None = None  # a query sees this many of the newest keys, itself included
    norm_eps: float = 0.0  # of the query and key norms
    soft_cap: float = 0.0  # scores become soft_cap * tanh(score / soft_cap); 0: they do not
    latent: int = 0
    query_scale: QueryScale | None = None
    chunked: bool = False
    norm_last: bool = False
    value_norm: bool = False
    appends: bool = True
    indexes: bool = False

    @property
    def reach(self) -> int:
        """The window as kernels are told it: its size, minus the size of a chunk, or 0 for none."""
        return (-1 if self.chunked else 1) * (self.window or 0)

    @property
    def value_dim(self) -> int:
        """Channels of V."""
        return self.latent or self.head_dim

    @property
    def qkv_width(self) -> int:
        """Columns of what attention is given: queries, keys, values."""
        if not self.appends:
            return self.heads * self.head_dim
        own = 0 if self.latent else self.kv_heads
        return (self.heads + self.kv_heads + own) * self.head_dim

    @property
    def out_width(self) -> int:
        """Columns of what attention makes of it."""
        return self.heads * self.value_dim

    @property
    def cached_width(self) -> int:
        """Numbers that a cache which is not packed keeps of a token and KV head."""
        return self.head_dim + self.value_dim

    def norms_all(self, q_norm: Tensor | None, k_norm: Tensor | None) -> bool:
        """Whether the norms are of all queries and of all keys of a token, not of each head."""
        wide = q_norm is not None and q_norm.numel() > self.head_dim
        return wide and k_norm is not None


def first_seen(position: _Position, reach: int) -> _Position:
    """The oldest position that a query at `position` sees; below 0 for one before the first.

    reach: `HeadShape.reach`.
    """
    if reach == 0:
        return position * 0
    return position + 1 - reach if reach > 0 else position - position % -reach


def cache_shapes(
    sequences: int, shape: HeadShape, capacity: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the K and the V tensor of one layer; capacity is a multiple of 16."""
    base = (sequences, shape.kv_heads)
    keys = (*base, capacity // KEYS_PER_VECTOR, shape.head_dim, KEYS_PER_VECTOR)
    return keys, (*base, capacity, shape.value_dim)


def latent_values(keys: Tensor, latent: int) -> Tensor:
    """V of keys [..., head_dim]: the first latent / 2 channels of either half, [..., latent]."""
    halves = keys.unflatten(-1, (2, -1))
    return halves[..., : latent // 2].flatten(-2)


def rope_channels(keys: Tensor, latent: int) -> Tensor:
    """The other channels of latent keys or queries, a copy in halves as RoPE has them."""
    halves = keys.unflatten(-1, (2, -1))
    return halves[..., latent // 2 :].flatten(-2)


def latent_heads(latent: Tensor, rotated: Tensor) -> Tensor:
    """Keys or queries [..., head_dim] of latent channels and those that RoPE rotates, in halves."""
    parts = (x.unflatten(-1, (2, -1)) for x in (latent, rotated))
    return torch.cat(tuple(parts), -1).flatten(-2)


def read_keys(keys: Tensor, slot: int, length: int) -> Tensor:
    """Return the first `length` keys of one sequence as [kv_heads, length, head_dim] (a copy)."""
    kv_heads, _, dim, _ = keys[slot].shape
    blocks = -(-length // KEYS_PER_VECTOR)
    whole = keys[slot, :, :blocks].transpose(2, 3).reshape(kv_heads, -1, dim)
    return whole[:, :length]
