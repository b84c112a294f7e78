"""The shape of one layer's attention and the layout of its uncompressed cache.

Float32. V is `[sequences, kv_heads, capacity, head_dim]`. K is
`[sequences, kv_heads, capacity / 16, head_dim, 16]`: the scores of 16 keys are one vector, and a
decoding CPU needs no horizontal sum.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

KEYS_PER_VECTOR = 16


@dataclass(frozen=True)
class HeadShape:
    """What the attention of one layer looks like, the same for every call."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float  # of the scores, usually head_dim ** -0.5
    window: int | None = None  # a query sees this many of the newest keys, itself included
    norm_eps: float = 0.0  # of the query and key norms
    soft_cap: float = 0.0  # scores become soft_cap * tanh(score / soft_cap); 0: they do not

    @property
    def qkv_width(self) -> int:
        """Columns of the fused projection: queries, keys, values."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    def norms_all(self, q_norm: Tensor | None, k_norm: Tensor | None) -> bool:
        """Whether the norms are of all queries and of all keys of a token, not of each head."""
        wide = q_norm is not None and q_norm.numel() > self.head_dim
        return wide and k_norm is not None


def cache_shapes(
    sequences: int, shape: HeadShape, capacity: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the K and the V tensor of one layer; capacity is a multiple of 16."""
    base = (sequences, shape.kv_heads)
    keys = (*base, capacity // KEYS_PER_VECTOR, shape.head_dim, KEYS_PER_VECTOR)
    return keys, (*base, capacity, shape.head_dim)


def read_keys(keys: Tensor, slot: int, length: int) -> Tensor:
    """Return the first `length` keys of one sequence as [kv_heads, length, head_dim] (a copy)."""
    kv_heads, _, dim, _ = keys[slot].shape
    blocks = -(-length // KEYS_PER_VECTOR)
    whole = keys[slot, :, :blocks].transpose(2, 3).reshape(kv_heads, -1, dim)
    return whole[:, :length]
