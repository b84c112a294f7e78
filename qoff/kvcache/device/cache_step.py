"""One forward pass on a cache on a GPU: where new tokens go, and which blocks they complete."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qoff.errors import ArgumentError
from qoff.kernels.layout.device_cache import DeviceLayerCache, DevicePass
from qoff.kernels.layout.kv_format import BLOCK_TOKENS
from qoff.kernels.layout.ragged import Ragged, Span
from qoff.kvcache.store.base import BlockView

from .blocks import far_blocks
from .prefetch import StagedBlocks
from .tables import host_memory
from .write_back import Outbox, Parcel

if TYPE_CHECKING:
    from .cache import DeviceCache

_STEADY_BLOCKS = 16


class CacheStep:
    """A pass of the sequences of `ragged`, in slots of the cache or in places of `slots`."""

    def __init__(
        self, cache: DeviceCache, ragged: Ragged, slots: Sequence[int] | None = None
    ) -> None:
        self._cache = cache
        self._packed = cache.packed
        self._opened: dict[int, DeviceLayerCache] = {}
        self._parcels: dict[int, Parcel] = {}
        self._new: dict[int, list[int]] = {}
        self._view: BlockView | None = None
        self._staged: StagedBlocks | None = None
        self._rows: list[list[int]] = []  # far blocks of each slot
        if slots is not None:
            ragged = Ragged(
                tuple(Span(slots[s.slot], s.start, s.count, s.past) for s in ragged.spans)
            )
        spans = sorted(ragged.spans, key=lambda span: span.slot)
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
            self._far_new = far_blocks([b for blocks in self._new.values() for b in blocks])
            self._tell_tables()
            # A subset's pass may be under way together with another one, and has its own.
            self._tables = cache.tables if slots is None else cache.tables.copy()
            self._look_far(spans)
            self._step = self._upload(spans, ragged)
            self._in_stage = self._stage_places()
        except BaseException:
            self.release()
            raise

    def prefetch(self, layer: int) -> None:
        """Start to bring the far blocks of a layer."""
        if self._view is not None:
            self._view.prefetch(layer)
        if self._staged is not None:
            self._staged.prefetch(layer)

    def open(self, layer: int) -> DeviceLayerCache:
        """What the attention of a layer reads and appends to; the same until `close`."""
        if layer not in self._opened:
            cache, stage, step = self._cache, None, self._step
            if self._staged is not None and self._in_stage is not None:
                numbers = self._in_stage + self._staged.open(layer)
                table = torch.where(self._in_stage >= 0, numbers, step.table)
                step = replace(step, table=table)
            if self._far_new:
                self._parcels[layer] = self._outbox.take(layer, self._far_new)
                stage = self._parcels[layer].records
            self._opened[layer] = DeviceLayerCache(
                cache.store.forms[layer],
                cache.store.pools[layer],
                cache.recent_k[layer],
                cache.recent_v[layer],
                step,
                () if self._view is None else self._view.open(layer),
                stage,
                cache.values_rotated,
            )
        return self._opened[layer]

    def close(self, layer: int) -> None:
        """Let go of the far blocks; send the new ones to where they lie."""
        if self._view is not None:
            self._view.close(layer)
        if self._staged is not None:
            self._staged.close(layer)
        if layer in self._parcels:
            self._outbox.send(self._parcels[layer])

    def end(self) -> None:
        """All new blocks are where they lie, and belong to their sequences."""
        if self._far_new:
            self._outbox.deliver(list(self._parcels.values()))
        for slot, blocks in self._new.items():
            self._cache.blocks[slot] += blocks

    def abandon(self) -> None:
        """Give back what a pass that did not end has taken."""
        if self._opened and self._destroys:
            raise ArgumentError(
                "the last forward pass on this KV cache ended half-way through; use a new cache"
            )
        self.release()

    def release(self) -> None:
        """Give back all that was brought and the new blocks."""
        if self._view is not None:
            self._view.abandon()
        if self._staged is not None:
            self._staged.abandon()
        if self._parcels:
            self._outbox.drop(list(self._parcels.values()))
            self._parcels = {}
        for blocks in self._new.values():
            self._cache.store.release(blocks)

    @property
    def _outbox(self) -> Outbox:
        assert self._cache.store.outbox is not None
        return self._cache.store.outbox

    def _allocate(self, slot: int, count: int) -> list[int]:
        """Blocks after those of a slot; far ones only where none of these is on the device."""
        cache, old = self._cache, len(self._cache.blocks[slot])
        on_device = old > 0 and cache.blocks[slot][-1] >= 0
        places = range(old, old + count)
        return cache.store.allocate(places, cache.expected[slot], on_device)

    def _tell_tables(self) -> None:
        """Blocks on the device by number, far ones by their place in the stage."""
        place = 0
        for slot, blocks in self._new.items():
            count = len(far_blocks(blocks))
            numbers = [*range(place, place + count), *blocks[count:]]
            self._cache.tables.write(slot, self._packed[slot] // BLOCK_TOKENS, numbers)
            place += count

    def _look_far(self, spans: Sequence[Span]) -> None:
        """A view of the far blocks of this pass, whose rows are in the order of the slots."""
        far, stage = self._cache.store.far, self._cache.store.stage
        rows: list[list[int]] = [[] for _ in range(self._cache.sequences)]
        ordered: list[Span] = []
        row, most = 0, max(span.count for span in spans)
        for span in spans:
            rows[span.slot] = far_blocks(self._cache.blocks[span.slot])
            ordered.append(Span(span.slot, row, span.count, span.past))
            row += span.count
        if far is None or not any(rows):
            return
        blocks = sorted({block for row in rows for block in row})
        if stage is not None and stage.takes(blocks, most * self._cache.group):
            self._staged, self._rows = stage.view(blocks), rows
        else:
            self._view = far.view(rows, Ragged(tuple(ordered)), 0)

    def _stage_places(self) -> Tensor | None:
        """int32 like the block table: the place in the stage, -1 for what does not pass through."""
        if self._staged is None:
            return None
        device = self._cache.store.device
        place = {block: i for i, block in enumerate(self._staged.blocks)}
        host = host_memory(self._step.table.numel(), torch.int32, device)
        table = host.view(self._step.table.shape).fill_(-1)
        for entries, row in zip(table, self._rows, strict=True):
            entries[: len(row)] = torch.tensor([place[block] for block in row], dtype=torch.int32)
        return table.to(device, non_blocking=True)

    def _upload(self, spans: Sequence[Span], ragged: Ragged) -> DevicePass:
        sequences = self._cache.sequences
        start, rows, length, packed, after, near, far_after = ([0] * sequences for _ in range(7))
        far_new = [0] * sequences  # blocks
        for span in spans:
            slot = span.slot
            new = self._new.get(slot, [])
            far_new[slot] = len(far_blocks(new))
            start[slot], rows[slot], length[slot] = span.past, span.count, span.past + span.count
            packed[slot] = self._packed[slot]
            after[slot] = packed[slot] + BLOCK_TOKENS * len(new)
            if self._staged is None:
                near[slot] = BLOCK_TOKENS * len(far_blocks(self._cache.blocks[slot]))
            far_after[slot] = packed[slot] + BLOCK_TOKENS * far_new[slot]
        row_start = [0]
        for count in rows:
            row_start.append(row_start[-1] + count)
        numbers = [start, row_start, length, packed, after]
        if self._cache.store.far is not None:
            numbers += [near, far_after]
        counts, table = self._tables.upload(numbers)
        positions, order, slots = self._row_tables(spans, ragged, counts[0])
        in_pool = max(p - n for p, n in zip(packed, near, strict=True))
        new_in_pool = [len(b) - far_new[slot] for slot, b in self._new.items()]
        return DevicePass(
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
            near=counts[5] if any(near) else None,
            far_after=counts[6] if any(far_new) else None,
            max_far_blocks=max(far_new),
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
