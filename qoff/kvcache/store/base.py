"""Where packed blocks lie: the interface, and a store in host memory that grows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from qoff.kernels.layout.kv_format import BLOCK_TOKENS, KVFormat
from qoff.kernels.layout.layer_cache import BlockTable, PackedTokens
from qoff.kernels.layout.ragged import Ragged

from .allocator import BlockAllocator

_GROWTH_BLOCKS = 16


class BlockView(ABC):
    """The packed tokens of the sequences of one forward pass, layer by layer."""

    def prefetch(self, layer: int) -> None:  # noqa: B027 - most have everything at hand
        """Start to bring what `open` will want, if there is room for it."""

    @abstractmethod
    def open(self, layer: int) -> tuple[PackedTokens, ...]:
        """Return the packed tokens of a layer, oldest first, readable until `close`."""

    def close(self, layer: int) -> None:  # noqa: B027
        """The layer's attention is done."""

    def abandon(self) -> None:  # noqa: B027
        """The pass will not go on."""


class BlockStore(ABC):
    """Packed blocks by number; each has its place in every layer, and counts who uses it.

    forms, kv_heads: of each layer.
    """

    def __init__(self, forms: Sequence[KVFormat], kv_heads: Sequence[int]) -> None:
        self.forms = tuple(forms)
        self.kv_heads = tuple(kv_heads)

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes allocated in memory, used or not."""

    def bytes_for(self, blocks: int) -> int:
        """The most bytes allocated while the store grows to `blocks` blocks, used ones included."""
        return self.nbytes

    def reserve(self, blocks: int) -> None:  # noqa: B027 - most are of a fixed size
        """Grow to `blocks` blocks, used ones included."""

    @abstractmethod
    def allocate(self, indices: Sequence[int], expected: int) -> list[int]:
        """Return blocks for these places in a sequence, 0 the oldest, that will have `expected`.

        Raises BudgetError when there are none.
        """

    @abstractmethod
    def share(self, blocks: Iterable[int]) -> None:
        """Count one user more of each block."""

    @abstractmethod
    def release(self, blocks: Iterable[int]) -> None:
        """Count one user less of each block; without users it is free."""

    @abstractmethod
    def write(self, layer: int, blocks: Sequence[int], records: Tensor) -> None:
        """Keep uint8 [blocks, kv_heads, form.nbytes] of a layer."""

    @abstractmethod
    def read(self, layer: int, block: int) -> Tensor:
        """Return a block of a layer, uint8 [kv_heads, form.nbytes]."""

    @abstractmethod
    def view(self, rows: Sequence[Sequence[int]], ragged: Ragged, first: int) -> BlockView:
        """The blocks of each slot of a forward pass; the oldest begins at position `first`."""

    def flush(self) -> None:  # noqa: B027 - most have nothing on its way
        """Return when everything written is where it belongs. Raises what went wrong."""


class GrowingBlocks(BlockStore):
    """Blocks in host memory, one pool a layer, which grow as they are asked for."""

    def __init__(self, forms: Sequence[KVFormat], kv_heads: Sequence[int]) -> None:
        super().__init__(forms, kv_heads)
        self._allocator = BlockAllocator(0)
        self.pools = [
            torch.empty(0, heads, form.nbytes, dtype=torch.uint8)
            for heads, form in zip(self.kv_heads, self.forms, strict=True)
        ]

    @property
    def nbytes(self) -> int:
        return sum(pool.nbytes for pool in self.pools)

    @property
    def used(self) -> int:
        """Blocks somebody uses."""
        return self._allocator.capacity - self._allocator.free

    def bytes_for(self, blocks: int) -> int:
        if blocks <= self._allocator.capacity:
            return self.nbytes
        sizes = [h * form.nbytes for h, form in zip(self.kv_heads, self.forms, strict=True)]
        return blocks * sum(sizes) + max(pool.nbytes for pool in self.pools)

    def reserve(self, blocks: int) -> None:
        if blocks <= self._allocator.capacity:
            return
        for layer, pool in enumerate(self.pools):
            if len(pool) < blocks:  # not yet, in a growth that ran out of memory
                grown = torch.empty(blocks, *pool.shape[1:], dtype=torch.uint8)
                grown[: len(pool)] = pool
                self.pools[layer] = grown
        self._allocator.grow(blocks)

    def allocate(self, indices: Sequence[int], expected: int) -> list[int]:
        count = len(indices)
        if count > self._allocator.free:
            capacity = self._allocator.capacity
            self.reserve(capacity + max(count, _GROWTH_BLOCKS, capacity // 2))
        return [self._allocator.allocate() for _ in range(count)]

    def share(self, blocks: Iterable[int]) -> None:
        self._allocator.share(blocks)

    def release(self, blocks: Iterable[int]) -> None:
        self._allocator.release(blocks)

    def write(self, layer: int, blocks: Sequence[int], records: Tensor) -> None:
        self.pools[layer][list(blocks)] = records

    def read(self, layer: int, block: int) -> Tensor:
        return self.pools[layer][block]

    def view(self, rows: Sequence[Sequence[int]], ragged: Ragged, first: int) -> BlockView:
        return _GrowingView(self, rows, ragged, first)


class _GrowingView(BlockView):
    def __init__(
        self, store: GrowingBlocks, rows: Sequence[Sequence[int]], ragged: Ragged, first: int
    ) -> None:
        self._store = store
        self._table = block_table(rows, ragged, [first] * len(rows)) if any(rows) else None

    def open(self, layer: int) -> tuple[PackedTokens, ...]:
        if self._table is None:
            return ()
        return (PackedTokens(self._store.forms[layer], self._store.pools[layer], self._table),)


def block_table(rows: Sequence[Sequence[int]], ragged: Ragged, first: Sequence[int]) -> BlockTable:
    """The table of a pass from the blocks of each slot and the position they begin at."""
    table = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int32)
    for row, blocks in zip(table, rows, strict=True):
        row[: len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
    return BlockTable(table, [BLOCK_TOKENS * len(blocks) for blocks in rows], ragged, first)
