"""The newest tokens of sequences, unpacked, in rings in the memory of a GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from qoff.kernels.layout.heads import HeadShape
from qoff.kernels.layout.kv_format import BLOCK_TOKENS, KVFormat
from qoff.kernels.upload import on_device


class Rings:
    """K and V by layer, of S sequences: [S, W, kv_heads, D], and V as wide as its form has it.

    window: W is a block more. together: they are one piece of memory, which goes back as a whole.
    """

    def __init__(
        self,
        shapes: Sequence[HeadShape],
        forms: Sequence[KVFormat],
        sequences: int,
        window: int,
        dtype: torch.dtype,
        device: torch.device,
        together: bool,
    ) -> None:
        self.tokens = window + BLOCK_TOKENS
        keys = [(sequences, self.tokens, one.kv_heads, one.head_dim) for one in shapes]
        pairs = zip(keys, forms, strict=True)
        values = [(*ring[:3], form.own_value_dim) for ring, form in pairs]
        found = _memory([*keys, *values], dtype, device, together)
        self.k, self.v = found[: len(shapes)], found[len(shapes) :]

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Of K of each layer."""
        return [tuple(ring.shape) for ring in self.k]

    @staticmethod
    def bytes_for(
        shapes: Sequence[HeadShape], sequences: int, window: int, dtype: torch.dtype
    ) -> int:
        """Bytes that rings take."""
        own = (1 if shape.latent else 2 for shape in shapes)
        values = sum(
            count * shape.kv_heads * shape.head_dim
            for count, shape in zip(own, shapes, strict=True)
        )
        return sequences * (window + BLOCK_TOKENS) * values * dtype.itemsize

    @property
    def all(self) -> list[Tensor]:
        """K of each layer, then V."""
        return [*self.k, *self.v]

    @property
    def nbytes(self) -> int:
        return sum(ring.nbytes for ring in self.all)

    @property
    def copied_bytes(self) -> int:
        """Bytes that are there twice for a moment when sequences are selected."""
        return max(ring.nbytes for ring in self.k)

    def select(self, sequences: Sequence[int]) -> None:
        """Go on with these sequences; as many as before stay where the others were."""
        index = on_device(torch.tensor(sequences), self.k[0].device)
        for rings in (self.k, self.v):
            for layer, ring in enumerate(rings):
                chosen = ring[index]
                if chosen.shape != ring.shape:
                    rings[layer] = chosen
                    continue
                with torch.inference_mode():  # rings may have been made in it
                    ring.copy_(chosen)

    def copy(self, source: int, target: int) -> None:
        """Let a sequence have the tokens of another one."""
        for ring in self.all:
            ring[target] = ring[source]

    def write(self, layer: int, slot: int, first: int, k: Tensor, v: Tensor) -> None:
        """Put tokens, k and v [kv_heads, tokens, D], at the places of `first` and the next ones."""
        ring, width = self.k[layer], self.v[layer].shape[-1]
        places = torch.arange(first, first + k.shape[1], device=ring.device) % self.tokens
        for ring, x in ((self.k[layer], k), (self.v[layer], v[..., :width])):
            ring[slot, places] = x.transpose(0, 1).to(ring.dtype)


def _memory(
    shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device, together: bool
) -> list[Tensor]:
    """Tensors of these shapes.

    torch takes pieces of 1 to 10 MiB from 20 MiB, and others in steps of 2 MiB: of rings of 7 MiB
    that go one by one, three tenths would be taken in vain.
    """
    if not together:
        return [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]
    sizes = [math.prod(shape) for shape in shapes]
    parts = torch.empty(sum(sizes), dtype=dtype, device=device).split(sizes)
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
