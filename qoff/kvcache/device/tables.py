"""The numbers of a forward pass that kernels read from device memory, in one copy a pass."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, takewhile

import torch
from torch import Tensor

from qoff.kernels.layout.device_cache import PassTables
from qoff.kernels.layout.kv_format import BLOCK_TOKENS
from qoff.kernels.layout.ragged import Ragged, Span
from qoff.kernels.upload import pinned

_STEADY_BLOCKS = 16
_COLUMNS = 16  # a block table grows by so many: its rows stay aligned
# Rows of counts, at most: seven, positions, what three of these grow by, slots of two numbers each.
_COUNTS = 13
_ALIGN = 4  # numbers: what lies behind each other starts at multiples of 16 bytes


def _row(sequences: int) -> int:
    """Numbers in a row of counts."""
    return -(-(sequences + 1) // _ALIGN) * _ALIGN


def offloaded_blocks(blocks: Iterable[int]) -> list[int]:
    """The offloaded ones among a sequence's blocks, its oldest, by their numbers in their store."""
    return [-1 - block for block in takewhile(lambda block: block < 0, blocks)]


class DeviceTables:
    """Block table and counts of S sequences, int32; where they are, they stay as long as they fit.

    Kernels of earlier passes may still be under way on the current stream: copies are in its order.
    """

    def __init__(self, sequences: int, device: torch.device) -> None:
        self._device = device
        self._sequences = sequences
        self._width = _row(sequences)
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
            columns = _columns(max(end, have + have // 2))
            self._blocks = torch.nn.functional.pad(self._blocks, (0, columns - have))
        self._blocks[slot, first:end] = torch.tensor(blocks, dtype=torch.int32)
        self._stale = True

    def write_new(self, new: Mapping[int, Sequence[int]], packed: Sequence[int]) -> None:
        """Set new blocks of slots, which have so many packed tokens.

        Offloaded ones, which come first, by their place in the write-back buffer.
        """
        place = 0
        for slot, blocks in new.items():
            count = len(offloaded_blocks(blocks))
            numbers = [*range(place, place + count), *blocks[count:]]
            self.write(slot, packed[slot] // BLOCK_TOKENS, numbers)
            place += count

    def select(self, sequences: Sequence[int]) -> None:
        """Go on with these sequences; as many as before have the memory that the others had."""
        self._blocks, self._stale = self._blocks[list(sequences)], True
        self._sequences, self._width = len(sequences), _row(len(sequences))

    def copy(self) -> DeviceTables:
        """The same, elsewhere on the device."""
        copied = DeviceTables(self._sequences, self._device)
        copied._blocks = self._blocks.clone()
        return copied

    def upload(self, counts: Sequence[Sequence[int]]) -> tuple[list[Tensor], Tensor]:
        """Bring counts, up to S + 1 numbers in a row of `_COUNTS`, and what is new of the table.

        Returns the counts on the device, and the table [S, columns]; valid until the next call.
        """
        numbers: list[int] = []
        ends: list[tuple[int, int]] = []
        for row in counts:
            ends.append((len(numbers), len(numbers) + len(row)))
            numbers += row
            numbers += [0] * (-len(numbers) % self._width)
        table = self._blocks.numel()
        size = table + _COUNTS * self._width
        if size != len(self._memory):
            self._memory = torch.empty(size, dtype=torch.int32, device=self._device)
            self._stale = True
        fresh, first = torch.tensor(numbers, dtype=torch.int32), table
        if self._stale:
            fresh, first = torch.cat((self._blocks.view(-1), fresh)), 0
        there = self._memory[first : first + len(fresh)]
        there.copy_(pinned(fresh, self._device), non_blocking=True)
        self._stale = False
        found = [self._memory[table + begin : table + end] for begin, end in ends]
        return found, self._memory[:table].view(self._sequences, -1)

    def counters(self, count: int) -> Tensor:
        """The first `count` rows of counts, and by how much they grow in a step: int32 [2, n].

        That is in as many rows behind them.
        """
        table = self._blocks.numel()
        return self._memory[table : table + 2 * count * self._width].view(2, -1)


def pass_tables(
    tables: DeviceTables,
    spans: Sequence[Span],
    ragged: Ragged,
    *,
    packed: Sequence[int],
    new: Mapping[int, Sequence[int]],
    resident_from: Sequence[int],
    offloads: bool,
    steady: bool,
) -> PassTables:
    """Upload what kernels read of a pass, whose `spans` are those of `ragged` in order of slots.

    packed: tokens in blocks of each of the S slots. new: blocks that the pass fills, negative ones
    elsewhere than on the device (offloads: there may be some). resident_from: tokens of each slot
    that are attended to elsewhere. steady: at decode, numbers of rows and the bound of packed
    tokens take few values; rows behind those of the new tokens are in slots without any. What the
    next step counts on from is there, too.
    """
    sequences = len(packed)
    start, rows, length, before, after, until = ([0] * sequences for _ in range(6))
    offloaded, in_pool = [0] * sequences, [0] * sequences  # new blocks, packed tokens
    ranked = 0
    for span in spans:
        slot, blocks = span.slot, new.get(span.slot, ())
        start[slot], rows[slot], length[slot] = span.past, span.count, span.past + span.count
        offloaded[slot] = sum(block < 0 for block in blocks)
        before[slot] = packed[slot]
        after[slot] = packed[slot] + BLOCK_TOKENS * len(blocks)
        until[slot] = packed[slot] + BLOCK_TOKENS * offloaded[slot]
        in_pool[slot] = packed[slot] - resident_from[slot]
        ranked = max(ranked, packed[slot])
    decodes = ragged.is_decode and tuple(spans) == ragged.spans
    some = decodes and len(spans) < sequences
    rows_in = _decode_rows([span.slot for span in spans], sequences, steady) if some else []
    counted, grow = [start, length], [rows, rows]
    if some:
        counted.append([start[slot] for slot in rows_in])
        grow.append([rows[slot] for slot in rows_in])
    numbers: list[Sequence[int]] = [*counted, *(grow if steady and decodes else ())]
    others = len(numbers)
    numbers += [[0, *accumulate(rows)], before, after]
    if offloads:
        numbers += [resident_from, until]
    if some:
        numbers.append([n for slot in rows_in for n in (slot, 0)])
    there, table = tables.upload(numbers)
    most = max(in_pool)
    if steady and decodes:
        most = min(_rounded_up(most // BLOCK_TOKENS), table.shape[1]) * BLOCK_TOKENS
    positions, order, slots = there[0], None, None
    if some:
        positions, slots = there[2], there[-1].view(torch.int64)
    elif not decodes:
        positions, order, slots = _row_tables(spans, ragged, there[0])
    return PassTables(
        start=there[0],
        row_start=there[others],
        length=there[1],
        packed=there[others + 1],
        after=there[others + 2],
        table=table,
        positions=positions,
        order=order,
        slots=slots,
        max_rows=max(rows),
        max_packed=most,
        max_new_blocks=max((len(b) - offloaded[slot] for slot, b in new.items()), default=0),
        resident_from=there[others + 3] if offloads else None,
        offloaded_until=there[others + 4] if any(offloaded) else None,
        max_offloaded_blocks=max(offloaded),
        max_ranked=ranked if any(resident_from) else None,
        counters=tables.counters(len(counted)) if steady and decodes else None,
    )


def _decode_rows(slots: Sequence[int], sequences: int, steady: bool) -> list[int]:
    """The slot of each row of a decode pass over some slots of S.

    steady: a power of two of rows, or S; so many slots without a new token come last.
    """
    rows = min(1 << (len(slots) - 1).bit_length(), sequences) if steady else len(slots)
    empty = sorted(set(range(sequences)).difference(slots)) if rows > len(slots) else []
    return [*slots, *empty[: rows - len(slots)]]


def _rounded_up(blocks: int) -> int:
    """A number of blocks, or up to a quarter more (or 16): four values from n to 2 n."""
    step = max(_STEADY_BLOCKS, 1 << max(blocks.bit_length() - 3, 0))
    return -(-blocks // step) * step


def _row_tables(
    spans: Sequence[Span], ragged: Ragged, start: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Position, place among the new tokens and slot of each row, in the order of the slots."""
    order = ragged.slots.argsort(stable=True)
    host = host_memory(3 * ragged.tokens, torch.int64, start.device).view(3, -1)
    host[0], host[1], host[2] = ragged.positions[order], order, ragged.slots[order]
    there = host.to(start.device, non_blocking=True)
    sorted_already = tuple(spans) == ragged.spans
    by_slot = ragged.is_decode and len(spans) < len(start)
    return there[0], None if sorted_already else there[1], there[2] if by_slot else None


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
    return -(-max(blocks, 1) // _COLUMNS) * _COLUMNS
