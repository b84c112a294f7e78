"""Tokens that are not packed: in float32, one after another."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from qoff.kernels.layout.heads import KEYS_PER_VECTOR, HeadShape, cache_shapes

PACKING = 8  # values for each of a layer's K and V that are packed together


class RecentTokens:
    """The unpacked tokens of each sequence in every layer, from place 0 on; `heads` says how."""

    def __init__(self, shapes: Sequence[HeadShape], sequences: int, capacity: int) -> None:
        self.shapes = shapes
        self.capacity = _whole_vectors(capacity)
        both = [cache_shapes(sequences, shape, self.capacity) for shape in shapes]
        self.keys = [torch.empty(keys) for keys, _ in both]
        self.values = [torch.empty(values) for _, values in both]

    @staticmethod
    def bytes_for(shapes: Sequence[HeadShape], sequences: int, capacity: int) -> int:
        """Bytes that tokens of this many sequences take."""
        return sum(
            4 * sequences * shape.kv_heads * shape.cached_width * _whole_vectors(capacity)
            for shape in shapes
        )

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (*self.keys, *self.values))

    def select(self, sequences: Sequence[int]) -> None:
        for tensors in (self.keys, self.values):
            for layer, tensor in enumerate(tensors):
                tensors[layer] = tensor[sequences].contiguous()

    def write(self, layer: int, slot: int, place: int, k: Tensor, v: Tensor) -> None:
        """Put tokens, k and v [kv_heads, tokens, D], at a place on; multiples of 16 both."""
        tokens = k.shape[1]
        keys = k.unflatten(1, (-1, KEYS_PER_VECTOR)).transpose(2, 3)
        first = place // KEYS_PER_VECTOR
        self.keys[layer][slot, :, first : first + tokens // KEYS_PER_VECTOR] = keys
        self.values[layer][slot, :, place : place + tokens] = v


class RecentWorkspace:
    """Room for the unpacked tokens of one layer at a time, shared by all that take turns."""

    def __init__(self) -> None:
        self._memory = torch.empty(0)
        self._last: _Taken | None = None

    @staticmethod
    def floats_for(shape: HeadShape, sequences: int, tokens: int) -> int:
        return sequences * shape.kv_heads * shape.cached_width * _whole_vectors(tokens)

    def take(
        self, shape: HeadShape, sequences: int, tokens: int, least: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values for this many tokens of each sequence, with anything in them.

        least: floats that there is room for, at least: what later layers of a pass will take, since
        jobs may be noted that know where the room of the first is.
        """
        wanted = self.floats_for(shape, sequences, tokens)
        if max(wanted, least) > self._memory.numel():
            self._memory, self._last = torch.empty(max(wanted, least)), None
        both = cache_shapes(sequences, shape, _whole_vectors(tokens))
        if self._last is None or self._last.shapes != both:  # most layers are alike
            keys, values = both
            own = self._memory[:wanted].split([math.prod(keys), math.prod(values)])
            self._last = _Taken(both, (own[0].view(keys), own[1].view(values)))
        return self._last.tensors


class _Taken(NamedTuple):
    """Keys and values as a layer has taken them."""

    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    tensors: tuple[Tensor, Tensor]


def _whole_vectors(tokens: int) -> int:
    return -(-tokens // KEYS_PER_VECTOR) * KEYS_PER_VECTOR
