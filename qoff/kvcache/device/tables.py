"""The numbers of a forward pass that kernels read from device memory, in one copy a pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_COLUMNS = 16  # a block table grows by so many: its rows stay aligned
_COUNTS = 7  # rows of counts, at most
_ALIGN = 4  # numbers: what lies behind each other starts at multiples of 16 bytes


class DeviceTables:
    """Block table and counts of S sequences, int32; where they are, they stay as long as they fit.

    Kernels of earlier passes may still be under way on the current stream: copies are in its order.
    """

    def __init__(self, sequences: int, device: torch.device) -> None:
        self._device = device
        self._sequences = sequences
        self._width = -(-(sequences + 1) // _ALIGN) * _ALIGN  # of a row of counts
        self._rows = 0  # of counts, known when there are some
        self._blocks = torch.zeros(sequences, _COLUMNS, dtype=torch.int32)
        self._memory = torch.empty(0, dtype=torch.int32, device=device)
        self._stale = True  # the block table on the device

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes

    def write(self, slot: int, first: int, blocks: Sequence[int]) -> None:
        """Set the blocks of a sequence from its block number `first` on."""
        end = first + len(blocks)
        have = self._blocks.shape[1]
        if end > have:
            grown = torch.zeros(
                self._sequences, _columns(max(end, have + have // 2)), dtype=torch.int32
            )
            grown[:, :have] = self._blocks
            self._blocks = grown
        self._blocks[slot, first:end] = torch.tensor(blocks, dtype=torch.int32)
        self._stale = True

    def select(self, sequences: Sequence[int]) -> DeviceTables:
        """Tables of the given sequences, in this order."""
        kept = DeviceTables(len(sequences), self._device)
        kept._blocks = self._blocks[list(sequences)]
        return kept

    def copy(self) -> DeviceTables:
        """The same tables in memory of their own, for a pass beside another one."""
        return self.select(range(self._sequences))

    def upload(self, counts: Sequence[Sequence[int]]) -> tuple[list[Tensor], Tensor]:
        """Bring counts, of up to S + 1 numbers each, and what is new of the block table.

        Returns the counts on the device, and the table [S, columns]; valid until the next call.
        """
        head = len(counts) * self._width
        size = head + self._blocks.numel()
        if len(counts) != self._rows or size != len(self._memory):
            self._memory = torch.empty(size, dtype=torch.int32, device=self._device)
            self._rows, self._stale = len(counts), True
        fresh = host_memory(size if self._stale else head, torch.int32, self._device)
        for row, numbers in zip(fresh[:head].view(-1, self._width), counts, strict=True):
            row[: len(numbers)] = torch.tensor(numbers, dtype=torch.int32)
        fresh[head:] = self._blocks.view(-1)[: len(fresh) - head]
        self._memory[: len(fresh)].copy_(fresh, non_blocking=True)
        self._stale = False
        rows = self._memory[:head].view(-1, self._width)
        found = [row[: len(numbers)] for row, numbers in zip(rows, counts, strict=True)]
        return found, self._memory[head:].view(self._sequences, -1)


def host_memory(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros in host memory that can be copied to a device without waiting.

    Where it is pinned, torch does not use it again before copies from it are done.
    """
    return torch.zeros(size, dtype=dtype, pin_memory=device.type == "cuda")


def tables_bytes(sequences: int, blocks: int, tokens: int, prefetched: bool) -> int:
    """The most bytes that the numbers of a pass take on the device.

    Of up to `blocks` blocks of each sequence and `tokens` new tokens: counts and block table, old
    and new while they grow, and numbers of rows. prefetched: with a table of places in a prefetch
    slot, and the block table of a layer that is made of it.
    """
    columns = _columns(blocks + blocks // 2)
    table = sequences * columns
    counts = _COUNTS * (sequences + 1 + _ALIGN)
    made = table * (3 * 4 + 1) if prefetched else 0
    return 2 * 4 * (counts + table) + made + 3 * 8 * tokens


def _columns(blocks: int) -> int:
    """Columns of a table of this many blocks."""
    return -(-max(blocks, 1) // _COLUMNS) * _COLUMNS
