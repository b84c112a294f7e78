"""The blocks of one tier: their memory, which are free, and how many sequences share the others."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import count
from typing import Self

import torch
from torch import Tensor

from qoff.errors import BudgetError
from qoff.kernels.layout.kv_format import KVFormat

_GROWTH_BLOCKS = 16


class BlockPool:
    """Blocks 0 .. capacity - 1 of a tier; one without users is free.

    layers: memory of each layer, uint8 [at least capacity, kv_heads, form.nbytes]; none on disk.
    users: of each block. grows: there are more when all are in use. poison: free ones are wiped.
    contents: of each block a number that changes when it is given away, or wiped: until then what
    was in it is there, and it may be shared although nobody uses it. Without growth the block is
    taken that was free for longest.
    """

    def __init__(
        self,
        tier: str,
        layers: Iterable[Tensor],
        capacity: int,
        *,
        grows: bool = False,
        poison: bool = False,
    ) -> None:
        self.tier, self.layers = tier, list(layers)
        self._grows, self._poison = grows, poison
        self.users = [0] * capacity
        self.contents = [0] * capacity
        order = range(capacity - 1, -1, -1) if grows else range(capacity)
        self._free = OrderedDict[int, None].fromkeys(order)  # the next is last, or first
        self._wipe(self._free)

    @classmethod
    def growing(
        cls,
        tier: str,
        forms: Sequence[KVFormat],
        kv_heads: Sequence[int],
        capacity: int = 0,
        device: torch.device | None = None,
    ) -> Self:
        """A pool in memory of its own, for layers of these forms."""
        shapes = [(capacity, h, form.nbytes) for h, form in zip(kv_heads, forms, strict=True)]
        layers = [torch.empty(shape, dtype=torch.uint8, device=device) for shape in shapes]
        return cls(tier, layers, capacity, grows=True)

    @property
    def capacity(self) -> int:
        return len(self.users)

    @property
    def used(self) -> int:
        """Blocks somebody uses."""
        return self.capacity - len(self._free)

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)

    def allocate(self, count: int) -> list[int]:
        """Return free blocks, each now with one user. Raises BudgetError where there are fewer."""
        if count > len(self._free):
            if not self._grows:
                raise BudgetError(f"all {self.capacity} KV blocks of the {self.tier} are in use")
            self.reserve(self.capacity + max(count, _GROWTH_BLOCKS, self.capacity // 2))
        blocks = [self._free.popitem(last=self._grows)[0] for _ in range(count)]
        for block in blocks:
            self._give(block)
        return blocks

    def take(self, wanted: int) -> int:
        """Return that block or the nearest that is free, now with one user. Raises BudgetError."""
        if not self._free:
            raise BudgetError(f"all {self.capacity} KV blocks of the {self.tier} are in use")
        near = (wanted + sign * away for away in count() for sign in (1, -1))
        block = next(block for block in near if block in self._free)
        del self._free[block]
        self._give(block)
        return block

    def share(self, block: int) -> None:
        """Count one user more; the first one of a free block has what was in it."""
        self._free.pop(block, None)
        self.users[block] += 1

    def release(self, block: int) -> None:
        self.users[block] -= 1
        if self.users[block] == 0:
            self._free[block] = None
            self._wipe([block])

    def bytes_for(self, blocks: int) -> int:
        if not self._grows or blocks <= self.capacity:
            return self.nbytes
        each = sum(layer.shape[1] * layer.shape[2] for layer in self.layers)  # uint8
        return blocks * each + max(layer.nbytes for layer in self.layers)

    def reserve(self, blocks: int) -> None:
        if not self._grows or blocks <= self.capacity:
            return
        for number, layer in enumerate(self.layers):
            if len(layer) < blocks:  # not yet, in a growth that ran out of memory
                grown = layer.new_empty(blocks, *layer.shape[1:])
                grown[: len(layer)] = layer
                self.layers[number] = grown
        more = OrderedDict[int, None].fromkeys(range(blocks - 1, self.capacity - 1, -1))
        self._free = more | self._free
        self.contents += [0] * (blocks - self.capacity)
        self.users += [0] * (blocks - self.capacity)

    def _give(self, block: int) -> None:
        self.users[block] = 1
        self.contents[block] += 1

    def _wipe(self, blocks: Iterable[int]) -> None:
        wiped = list(blocks) if self._poison else []
        for layer in self.layers if wiped else ():
            layer[wiped] = 0xFF
        for block in wiped:
            self.contents[block] += 1
