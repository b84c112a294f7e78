"""Where packed blocks lie: the interface, and a store in host memory that grows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from qoff.kernels.layout.kv_format import BLOCK_TOKENS, KVFormat
from qoff.kernels.layout.layer_cache import RUN_BLOCKS, BlockTable, PackedTokens
from qoff.kernels.layout.ragged import Ragged
from qoff.kernels.layout.steady import SteadyMemory
from qoff.kvcache.layers import LayerView

from .placement import HOST
from .pool import BlockPool
from .sweep import BlockSweep

# Makes the records of the blocks at some places of a list: those of some numbers in memory, uint8
# [blocks, kv_heads, form.nbytes].
Fill: TypeAlias = Callable[[Sequence[int], Tensor, Sequence[int]], None]


class BlockView(LayerView[tuple[PackedTokens, ...]]):
    """The blocks of the sequences of a pass, the oldest first."""

    moves = False  # whether some blocks come layer by layer
    chooses = False  # whether these come when attention has chosen them

    @abstractmethod
    def told(self) -> tuple[int, ...]:
        """What kernels are told at decode, beside the values in memory and what `arrive` says.

        With `memory` the numbers stay the same for many passes.
        """

    def arrive(self, layer: int) -> int | None:
        """Wait for the blocks of a layer that move; their address, until `close`."""
        return None

    def begin_sweep(self) -> BlockSweep | None:
        """Begin a sweep that may bring the blocks that move, if there can be one."""
        return None

    def sweep(self, layer: int, sweep: BlockSweep) -> None:
        """Have the blocks of a layer that move come by jobs, when it is opened the next time."""

    def counters(self) -> list[Tensor]:
        """Numbers that are one larger at the next token; where no blocks move."""
        return []


class Blocks(ABC):
    """Packed blocks by number; each has its place in every layer, in the pool of a tier."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes allocated in memory, used or not."""

    def bytes_for(self, blocks: int) -> int:
        """The most bytes allocated while there come to be `blocks` blocks, used ones included."""
        return self.nbytes

    def reserve(self, blocks: int) -> None:  # noqa: B027 - most are of a fixed size
        """Grow to `blocks` blocks, used ones included."""

    def claim(self, sequences: int) -> int:
        """Give a cache places for so many sequences, for `allocate`; the number of the first."""
        return 0

    @abstractmethod
    def allocate(self, indices: Sequence[int], expected: int, owner: int) -> list[int]:
        """Return blocks for these places in a sequence, 0 the oldest, that will have `expected`.

        owner: the sequence's number; see `claim`. Raises BudgetError when there are none.
        """

    @abstractmethod
    def place(self, block: int) -> tuple[BlockPool, int]:
        """The pool of a block, and its number there."""

    def tier(self, block: int) -> str:
        """Where a block lies."""
        return self.place(block)[0].tier

    def contents(self, block: int) -> int:
        """A number that is another one as soon as the block may have other tokens."""
        pool, number = self.place(block)
        return pool.contents[number]

    def stands_for(self, index: int, expected: int) -> int:
        """The number of some block where the one at this place in a sequence would lie."""
        return 0

    def share(self, blocks: Iterable[int]) -> None:
        """Count one user more of each block, which may have had none since its last one."""
        for pool, number in map(self.place, blocks):
            pool.share(number)

    def release(self, blocks: Iterable[int]) -> None:
        """Count one user less of each block; without users it is free."""
        for pool, number in map(self.place, blocks):
            pool.release(number)


class BlockStore(Blocks):
    """Blocks that attention on a CPU reads, from where they lie or brought there.

    forms, kv_heads: of each layer.
    """

    def __init__(self, forms: Sequence[KVFormat], kv_heads: Sequence[int]) -> None:
        self.forms, self.kv_heads = tuple(forms), tuple(kv_heads)

    @property
    def in_place(self) -> bool:
        """Whether blocks are made where they stay, and nothing but kernels reads them."""
        return False

    @property
    @abstractmethod
    def memory(self) -> Sequence[Tensor]:
        """Of each layer, where those blocks lie that are in memory."""

    @abstractmethod
    def fill(self, layer: int, blocks: Sequence[int], fill: Fill) -> None:
        """Have records of a layer made where they lie or are sent from, some at a time."""

    def write(self, layer: int, blocks: Sequence[int], records: Tensor) -> None:
        """Keep uint8 [blocks, kv_heads, form.nbytes] of a layer."""

        def copy(places: Sequence[int], memory: Tensor, numbers: Sequence[int]) -> None:
            for i, number in zip(places, numbers, strict=True):
                memory[number].copy_(records[i])

        self.fill(layer, blocks, copy)

    @abstractmethod
    def read(self, layer: int, block: int) -> Tensor:
        """Return a block of a layer, uint8 [kv_heads, form.nbytes]."""

    @abstractmethod
    def view(
        self,
        rows: Sequence[Sequence[int]],
        ragged: Ragged,
        first: int,
        memory: SteadyMemory | None = None,
        sparse: bool = False,
        freed: Sequence[int] | None = None,
    ) -> BlockView:
        """The blocks of each slot of a forward pass; the oldest begins at position `first`.

        memory: where what is told of them lies. sparse: whether attention chooses some of them.
        freed: of the oldest ones of each slot, which the pass does not see, so many are not there.
        """


class GrowingBlocks(BlockStore):
    """Blocks in host memory that grow as they are asked for."""

    in_place = True

    def __init__(self, forms: Sequence[KVFormat], kv_heads: Sequence[int]) -> None:
        super().__init__(forms, kv_heads)
        self.pool = BlockPool.growing(HOST, forms, kv_heads)

    @property
    def memory(self) -> Sequence[Tensor]:
        return self.pool.layers

    @property
    def nbytes(self) -> int:
        return self.pool.nbytes

    def bytes_for(self, blocks: int) -> int:
        return self.pool.bytes_for(blocks)

    def reserve(self, blocks: int) -> None:
        self.pool.reserve(blocks)

    def place(self, block: int) -> tuple[BlockPool, int]:
        return self.pool, block

    def allocate(self, indices: Sequence[int], expected: int, owner: int) -> list[int]:
        return self.pool.allocate(len(indices))

    def fill(self, layer: int, blocks: Sequence[int], fill: Fill) -> None:
        fill(range(len(blocks)), self.pool.layers[layer], blocks)

    def read(self, layer: int, block: int) -> Tensor:
        return self.pool.layers[layer][block]

    def view(
        self,
        rows: Sequence[Sequence[int]],
        ragged: Ragged,
        first: int,
        memory: SteadyMemory | None = None,
        sparse: bool = False,
        freed: Sequence[int] | None = None,
    ) -> BlockView:
        return _GrowingView(self, rows, ragged, first, memory, freed or [0] * len(rows))


class _GrowingView(BlockView):
    def __init__(
        self,
        store: GrowingBlocks,
        rows: Sequence[Sequence[int]],
        ragged: Ragged,
        first: int,
        memory: SteadyMemory | None,
        freed: Sequence[int],
    ) -> None:
        self._store = store
        self._table = None
        if any(len(row) > gone for row, gone in zip(rows, freed, strict=True)):
            self._table = block_table(rows, ragged, [first] * len(rows), memory, "blocks")

    def told(self) -> tuple[int, ...]:
        return told([] if self._table is None else [(self._store.pool, self._table)])

    def counters(self) -> list[Tensor]:
        return [] if self._table is None else [self._table.positions]

    def open(self, layer: int) -> tuple[PackedTokens, ...]:
        if self._table is None:
            return ()
        store = self._store
        return (PackedTokens(store.forms[layer], store.pool.layers[layer], self._table),)


def told(near: Iterable[tuple[BlockPool, BlockTable]]) -> tuple[int, ...]:
    """What kernels are told at decode of blocks that they find in their pools."""
    found: list[int] = []
    for pool, table in near:
        found += [*table.told(), *(layer.data_ptr() for layer in pool.layers)]
    return tuple(found)


def block_table(
    rows: Sequence[Sequence[int]],
    ragged: Ragged,
    first: Sequence[int],
    memory: SteadyMemory | None,
    name: str,
) -> BlockTable:
    """The table of a pass from the blocks of each slot and the position they begin at.

    memory, name: where it lies; the table is then of few widths.
    """
    width = max(map(len, rows))
    if memory is not None:
        width = -(-width // RUN_BLOCKS) * RUN_BLOCKS
    blocks = torch.zeros(len(rows), width, dtype=torch.int32)
    for row, numbers in zip(blocks, rows, strict=True):
        row[: len(numbers)] = torch.tensor(numbers, dtype=torch.int32)
    table = BlockTable(blocks, [BLOCK_TOKENS * len(numbers) for numbers in rows], ragged, first)
    return table if memory is None else table.kept_in(memory, name)
