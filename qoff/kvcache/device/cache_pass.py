"""One forward pass on a cache on a GPU: where new tokens go, and which blocks they complete."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from qoff.errors import ArgumentError
from qoff.kernels.layout.device_cache import DeviceLayerCache, PassTables
from qoff.kernels.layout.kv_format import BLOCK_TOKENS
from qoff.kernels.layout.ragged import Ragged, Span
from qoff.kvcache.slots import SlotPass
from qoff.kvcache.store.base import BlockView

from .blocks import DeviceBlocks, offloaded_blocks
from .prefetch import PrefetchedBlocks
from .tables import DeviceTables, host_memory
from .write_back import WriteBack, WriteBackQueue

_STEADY_BLOCKS = 16


class DeviceState(Protocol):
    """What a pass reads and changes of its cache."""

    window: int
    ring: int  # tokens that there is room for unpacked
    group: int  # most query heads of a KV head
    steady: bool
    values_rotated: bool
    lengths: list[int]
    blocks: list[list[int]]
    expected: list[int]
    store: DeviceBlocks
    tables: DeviceTables
    recent_k: list[Tensor]
    recent_v: list[Tensor]

    @property
    def packed(self) -> list[int]: ...

    @property
    def sequences(self) -> int: ...

    def over(self, ended: SlotPass) -> None: ...


class DeviceCachePass(SlotPass):
    """A pass of the sequences of `ragged`, in slots of the cache or in places of `slots`."""

    def __init__(
        self, cache: DeviceState, ragged: Ragged, slots: Sequence[int] | None = None
    ) -> None:
        self._cache = cache
        self._packed = cache.packed
        self._opened: dict[int, DeviceLayerCache] = {}
        self._write_backs: dict[int, WriteBack] = {}
        self._new: dict[int, list[int]] = {}
        self._view: BlockView | None = None
        self._prefetched: PrefetchedBlocks | None = None
        self._rows: list[list[int]] = []  # offloaded blocks of each slot
        if slots is not None:
            ragged = Ragged(
                tuple(Span(slots[s.slot], s.start, s.count, s.past) for s in ragged.spans)
            )
        self._spans = spans = sorted(ragged.spans, key=lambda span: span.slot)
        for span in spans:
            if span.slot >= cache.sequences or span.past != cache.lengths[span.slot]:
                raise ArgumentError(
                    f"{span} does not continue a sequence of this cache, of lengths {cache.lengths}"
                )
        unpacked = [span.past + span.count - self._packed[span.slot] for span in spans]
        # With more, tokens of before the pass are written over.
        self._destroys = max(unpacked) > cache.ring
        try:
            for span, tokens in zip(spans, unpacked, strict=True):
                count = max(0, tokens - cache.window) // BLOCK_TOKENS
                if count:
                    self._new[span.slot] = self._allocate(span.slot, count)
            self._new_offloaded = offloaded_blocks(
                [b for blocks in self._new.values() for b in blocks]
            )
            self._tell_tables()
            # A subset's pass may be under way together with another one, and has its own.
            self._tables = cache.tables if slots is None else cache.tables.copy()
            self._find_offloaded(spans)
            self._step = self._upload(spans, ragged)
            self._prefetched_table = self._prefetch_places()
        except BaseException:
            self.abandon()
            raise

    def prefetch(self, layer: int) -> None:
        """Start to bring the offloaded blocks of a layer."""
        if self._view is not None:
            self._view.prefetch(layer)
        if self._prefetched is not None:
            self._prefetched.prefetch(layer)

    def open(self, layer: int) -> DeviceLayerCache:
        """What the attention of a layer reads and appends to; the same until `close`."""
        if layer not in self._opened:
            cache, written, step = self._cache, None, self._step
            if self._prefetched is not None and self._prefetched_table is not None:
                numbers = self._prefetched_table + self._prefetched.open(layer)
                table = torch.where(self._prefetched_table >= 0, numbers, step.table)
                step = replace(step, table=table)
            if self._new_offloaded:
                self._write_backs[layer] = self._write_back.take(layer, self._new_offloaded)
                written = self._write_backs[layer].records
            self._opened[layer] = DeviceLayerCache(
                cache.store.forms[layer],
                cache.store.pools[layer],
                cache.recent_k[layer],
                cache.recent_v[layer],
                step,
                () if self._view is None else self._view.open(layer),
                written,
                cache.values_rotated,
            )
        return self._opened[layer]

    def close(self, layer: int) -> None:
        """Let go of the offloaded blocks; send the new ones to where they lie."""
        if self._view is not None:
            self._view.close(layer)
        if self._prefetched is not None:
            self._prefetched.close(layer)
        if layer in self._write_backs:
            self._write_back.send(self._write_backs[layer])

    def end(self) -> None:
        """All new blocks are where they lie, and belong to their sequences."""
        if self._new_offloaded:
            self._write_back.deliver(list(self._write_backs.values()))
        cache = self._cache
        for slot, blocks in self._new.items():
            cache.blocks[slot] += blocks
        self._new, self._write_backs = {}, {}
        for span in self._spans:
            cache.lengths[span.slot] += span.count
        cache.over(self)

    @property
    def spoils(self) -> bool:
        return self._destroys and bool(self._opened)

    def abandon(self) -> None:
        """Give back all that was brought and the new blocks."""
        if self._view is not None:
            self._view.abandon()
        if self._prefetched is not None:
            self._prefetched.abandon()
        if self._write_backs:
            self._write_back.drop(list(self._write_backs.values()))
            self._write_backs = {}
        for blocks in self._new.values():
            self._cache.store.release(blocks)
        self._new = {}
        self._cache.over(self)

    @property
    def _write_back(self) -> WriteBackQueue:
        assert self._cache.store.write_back is not None
        return self._cache.store.write_back

    def _allocate(self, slot: int, count: int) -> list[int]:
        """New blocks of a slot; offloaded ones only where none of its blocks is on the device."""
        cache, old = self._cache, len(self._cache.blocks[slot])
        on_device = old > 0 and cache.blocks[slot][-1] >= 0
        places = range(old, old + count)
        return cache.store.allocate(places, cache.expected[slot], on_device)

    def _tell_tables(self) -> None:
        """Blocks on the device by number, new offloaded ones by place in the write-back buffer."""
        place = 0
        for slot, blocks in self._new.items():
            count = len(offloaded_blocks(blocks))
            numbers = [*range(place, place + count), *blocks[count:]]
            self._cache.tables.write(slot, self._packed[slot] // BLOCK_TOKENS, numbers)
            place += count

    def _find_offloaded(self, spans: Sequence[Span]) -> None:
        """A view of the offloaded blocks of this pass, whose rows are in the order of the slots."""
        offloaded, prefetcher = self._cache.store.offloaded, self._cache.store.prefetcher
        rows: list[list[int]] = [[] for _ in range(self._cache.sequences)]
        ordered: list[Span] = []
        row, most = 0, max(span.count for span in spans)
        for span in spans:
            rows[span.slot] = offloaded_blocks(self._cache.blocks[span.slot])
            ordered.append(Span(span.slot, row, span.count, span.past))
            row += span.count
        if offloaded is None or not any(rows):
            return
        blocks = sorted({block for row in rows for block in row})
        if prefetcher is not None and prefetcher.takes(blocks, most * self._cache.group):
            self._prefetched, self._rows = prefetcher.view(blocks), rows
        else:
            self._view = offloaded.view(rows, Ragged(tuple(ordered)), 0)

    def _prefetch_places(self) -> Tensor | None:
        """int32 like the block table: the place in the prefetch slot, -1 for blocks not moved."""
        if self._prefetched is None:
            return None
        device = self._cache.store.device
        place = {block: i for i, block in enumerate(self._prefetched.blocks)}
        host = host_memory(self._step.table.numel(), torch.int32, device)
        table = host.view(self._step.table.shape).fill_(-1)
        for entries, row in zip(table, self._rows, strict=True):
            entries[: len(row)] = torch.tensor([place[block] for block in row], dtype=torch.int32)
        return table.to(device, non_blocking=True)

    def _upload(self, spans: Sequence[Span], ragged: Ragged) -> PassTables:
        sequences = self._cache.sequences
        start, rows, length, packed, after, resident_from, offloaded_until = (
            [0] * sequences for _ in range(7)
        )
        new_offloaded = [0] * sequences  # blocks
        for span in spans:
            slot = span.slot
            new = self._new.get(slot, [])
            new_offloaded[slot] = len(offloaded_blocks(new))
            start[slot], rows[slot], length[slot] = span.past, span.count, span.past + span.count
            packed[slot] = self._packed[slot]
            after[slot] = packed[slot] + BLOCK_TOKENS * len(new)
            if self._prefetched is None:
                resident_from[slot] = BLOCK_TOKENS * len(offloaded_blocks(self._cache.blocks[slot]))
            offloaded_until[slot] = packed[slot] + BLOCK_TOKENS * new_offloaded[slot]
        row_start = [0]
        for count in rows:
            row_start.append(row_start[-1] + count)
        numbers = [start, row_start, length, packed, after]
        if self._cache.store.offloaded is not None:
            numbers += [resident_from, offloaded_until]
        counts, table = self._tables.upload(numbers)
        positions, order, slots = self._row_tables(spans, ragged, counts[0])
        in_pool = max(p - n for p, n in zip(packed, resident_from, strict=True))
        new_in_pool = [len(b) - new_offloaded[slot] for slot, b in self._new.items()]
        return PassTables(
            start=counts[0],
            row_start=counts[1],
            length=counts[2],
            packed=counts[3],
            after=counts[4],
            table=table,
            positions=positions,
            order=order,
            slots=slots,
            max_rows=max(rows),
            max_packed=self._most(in_pool, table.shape[1]),
            max_new_blocks=max(new_in_pool, default=0),
            resident_from=counts[5] if any(resident_from) else None,
            offloaded_until=counts[6] if any(new_offloaded) else None,
            max_offloaded_blocks=max(new_offloaded),
        )

    def _most(self, packed: int, columns: int) -> int:
        """At least `packed`; a bound that seldom changes, where that is asked for."""
        if not self._cache.steady:
            return packed
        some = _STEADY_BLOCKS * BLOCK_TOKENS
        return min(-(-packed // some) * some, columns * BLOCK_TOKENS)

    def _row_tables(
        self, spans: Sequence[Span], ragged: Ragged, start: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Position, place among the new tokens and slot of each row, in the order of the slots."""
        sorted_already = tuple(spans) == ragged.spans
        everyone = len(spans) == self._cache.sequences
        if ragged.is_decode and sorted_already and everyone:
            return start, None, None
        order = ragged.slots.argsort(stable=True)
        device = self._cache.store.device
        host = host_memory(3 * ragged.tokens, torch.int64, device).view(3, -1)
        host[0], host[1], host[2] = ragged.positions[order], order, ragged.slots[order]
        there = host.to(device, non_blocking=True)
        by_slot = ragged.is_decode and not everyone
        return there[0], None if sorted_already else there[1], there[2] if by_slot else None
