"""Packed blocks on device, host and disk, in memory of a fixed size, as forward passes see them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from qoff.kernels.layout.kv_format import BLOCK_TOKENS
from qoff.kernels.layout.layer_cache import BlockTable, PackedTokens
from qoff.kernels.layout.ragged import Ragged
from qoff.kernels.layout.steady import SteadyMemory

from .base import BlockView, block_table, told
from .placement import DISK, HOST, TIERS
from .pool import BlockPool
from .ring import LayerFetches
from .sparse import ChosenBlocks
from .storage import BlockStorage
from .sweep import BlockSweep, SweptBlocks


class TieredBlocks(BlockStorage):
    """Blocks that attention reads where they are, or in the ring."""

    def view(
        self,
        rows: Sequence[Sequence[int]],
        ragged: Ragged,
        first: int,
        memory: SteadyMemory | None = None,
        sparse: bool = False,
        freed: Sequence[int] | None = None,
    ) -> BlockView:
        return _TieredView(self, rows, ragged, first, memory, sparse, freed or [0] * len(rows))


class _TieredView(BlockView):
    """Tables of the blocks in place, and of those that go through the ring."""

    def __init__(
        self,
        store: BlockStorage,
        rows: Sequence[Sequence[int]],
        ragged: Ragged,
        first: int,
        memory: SteadyMemory | None,
        sparse: bool,
        freed: Sequence[int],
    ) -> None:
        self._store, self._rows, self._freed = store, rows, freed
        self._how = ragged, first, memory
        staged = {DISK} if store.plan.attends_on_host else {DISK, HOST}
        self._places = {block: store.place(block) for row in rows for block in row}
        live = {block for row, gone in zip(rows, freed, strict=True) for block in row[gone:]}
        moved = sorted(block for block in live if self._places[block][0].tier in staged)
        self._copy_plan = store.copy_plan(moved, store.plan.ring_blocks)
        index = dict(zip(moved, self._copy_plan.places, strict=True))
        self._far = list(self._tables(staged, index, "the ring"))
        self.moves = bool(self._far)
        self._near: list[tuple[BlockPool, BlockTable]] = []
        for pool in (store.pools[tier] for tier in TIERS if tier not in staged):
            local = {block: i for block, (there, i) in self._places.items() if there is pool}
            self._near += [(pool, table) for table in self._tables({pool.tier}, local, pool.tier)]
        self._fetches: LayerFetches | SweptBlocks = LayerFetches(
            store.ring, lambda layer, slot: store.bring(layer, self._copy_plan, slot)
        )
        if sparse and store.choices is not None and self.moves:
            self.chooses = True
            numbers = {block: block for block in moved}
            (table,) = self._tables(staged, numbers, "bounds")
            self._fetches = ChosenBlocks(
                store.ring,
                store.bounds,
                store.choices,
                store.bring_records,
                moved,
                self._copy_plan.places,
                table,
            )

    def told(self) -> tuple[int, ...]:
        far = [number for table in self._far for number in table.told()]
        return (*far, *told(self._near))

    def counters(self) -> list[Tensor]:
        return [table.positions for _, table in self._near]

    def prefetch(self, layer: int) -> None:
        if self.moves:
            self._fetches.prefetch(layer)

    def begin_sweep(self) -> BlockSweep | None:
        return None if self.chooses else self._store.sweep()

    def sweep(self, layer: int, sweep: BlockSweep) -> None:
        if not self.moves:
            return
        assert self._store.ring is sweep.ring
        if not isinstance(self._fetches, SweptBlocks):
            self._fetches = SweptBlocks(sweep)
        plan, slot = self._copy_plan, sweep.next_slot()
        self._fetches.add(layer, self._store.bringing(layer, plan, slot, self._copied))

    def arrive(self, layer: int) -> int | None:
        return self._fetches.open(layer).data_ptr() if self.moves else None

    def open(self, layer: int) -> tuple[PackedTokens, ...]:
        store, form = self._store, self._store.forms[layer]
        parts = []
        if self._far:
            fetches = self._fetches
            records = store.records(layer, fetches.open(layer))
            blocks = records.unflatten(1, (store.kv_heads[layer], form.nbytes))
            bounds, bring = None, None
            if isinstance(fetches, ChosenBlocks):
                bounds = fetches.of(layer)
                bring = None if bounds is not None else fetches.bringing(layer)
            parts += [PackedTokens(form, blocks, table, bounds, bring) for table in self._far]
        for pool, table in self._near:
            parts.append(PackedTokens(form, pool.layers[layer], table))
        return tuple(parts)

    def close(self, layer: int) -> None:
        self._fetches.close(layer)

    def abandon(self) -> None:
        self._fetches.abandon()

    @cached_property
    def _copied(self) -> Tensor | None:
        """Place in a slot and number of each block that comes from host memory, as jobs read it."""
        runs, (_, _, memory) = self._copy_plan.from_host, self._how
        if not runs:
            return None
        pairs = [(run.at + i, run.local + i) for run in runs for i in range(run.count)]
        table = torch.full((self._store.plan.ring_blocks, 2), -1, dtype=torch.int64)
        table[: len(pairs)] = torch.tensor(pairs)
        assert memory is not None  # of a pass that is recorded
        return memory.put("copied from the host", table)

    def _tables(self, tiers: set[str], index: Mapping[int, int], name: str) -> Iterator[BlockTable]:
        """The tables of the blocks on some tiers that have an index; one for either lap."""
        ragged, first, memory = self._how
        for lap in range(2 if self._store.laps else 1):
            mine = [
                self._inside(row, gone, tiers, lap)
                for row, gone in zip(self._rows, self._freed, strict=True)
            ]
            ends = [places[-1] if places else -1 for places in mine]
            if all(end < gone for end, gone in zip(ends, self._freed, strict=True)):
                continue
            for places in mine:
                assert all(b == a + 1 for a, b in pairwise(places))
            starts = [first + BLOCK_TOKENS * (places[0] if places else 0) for places in mine]
            # Those that are not there are not read; so no query sees them.
            named = [
                [index.get(row[i], 0) for i in places]
                for row, places in zip(self._rows, mine, strict=True)
            ]
            yield block_table(named, ragged, starts, memory, f"{name} {lap}")

    def _inside(self, row: Sequence[int], gone: int, tiers: set[str], lap: int) -> list[int]:
        """Where in a sequence its blocks on some tiers are, in every other lap that is there."""
        laps, begin = self._store.laps, 0
        if laps:
            begin = gone // laps * laps
        return [
            i
            for i in range(begin, len(row))
            if self._places[row[i]][0].tier in tiers and (not laps or i // laps % 2 == lap)
        ]
