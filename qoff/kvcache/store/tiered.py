"""Packed blocks on device, host and disk, in memory of a fixed size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from qoff.kernels.layout.kv_format import BLOCK_TOKENS, KVFormat
from qoff.kernels.layout.layer_cache import BlockTable, PackedTokens
from qoff.kernels.layout.ragged import Ragged
from qoff.kernels.layout.steady import SteadyMemory
from qoff.memory.arena import Arena
from qoff.memory.instrumentation import PLAIN, Instrumentation
from qoff.memory.io.copies import Copies
from qoff.memory.io.spill import SpillFile

from .base import BlockStore, BlockView, Fill, block_table, told
from .placement import DEVICE, DISK, HOST, TIERS, KVPlacement
from .plan import STAGE_BLOCKS, BlockPlan
from .pool import BlockPool
from .ring import CopyPlan, LayerFetches, Run, runs
from .sparse import BlockBounds, ChosenBlocks, Numbers, Records, record_runs
from .staging import Staging

_READ_THROUGH = 128 << 10  # bytes between two runs that take as long as another read


class TieredBlocks(BlockStore):
    """Blocks of `plan` in two arenas and a file; `placement` says which of a sequence's lie where.

    Blocks on disk, and on the host unless the CPU attends to them there, are brought into a ring on
    the device before attention reads them. layers: their numbers in the model. staging: shared with
    the stores of other layers; None: its own. spill_at: where its bytes of `spill` begin.
    """

    def __init__(
        self,
        forms: Sequence[KVFormat],
        kv_heads: Sequence[int],
        plan: BlockPlan,
        placement: KVPlacement,
        arenas: dict[str, Arena],
        copies: Copies,
        spill: SpillFile | None,
        *,
        layers: Sequence[int] | None = None,
        staging: Staging | None = None,
        spill_at: int = 0,
        instrumentation: Instrumentation = PLAIN,
    ) -> None:
        super().__init__(forms, kv_heads)
        self._numbers = range(len(self.forms)) if layers is None else layers
        self._spill_at = spill_at
        self.plan, self.placement = plan, placement
        self.spill, self._copies = spill, copies
        self._clock = instrumentation.clock
        self._claimed = 0  # sequences
        self._bases: dict[str, int] = {}  # first number of each tier's blocks
        self.pools: dict[str, BlockPool] = {}
        base = 0
        for tier in TIERS:
            count = plan.blocks[tier]
            self._bases[tier], base = base, base + count
            memory = [] if tier == DISK else self._memory(arenas[tier], count)
            self.pools[tier] = BlockPool(tier, memory, count, poison=instrumentation.poison)
        used = [tier for tier in TIERS if plan.blocks[tier]]
        self.laps = plan.lap if len(used) > 1 else 0  # where a sequence's blocks change tiers
        self._staging = staging or Staging([plan], arenas, copies, instrumentation)
        self.ring = self._staging.ring
        self.bounds: BlockBounds | None = None
        if plan.bounded:
            self.bounds = BlockBounds(forms, kv_heads, plan.bounded, arenas[DEVICE])
        self._writes: dict[tuple[int, int], Future[None]] = {}

    @property
    def nbytes(self) -> int:
        tiers = self.plan.tier_bytes()
        return tiers[DEVICE] + tiers[HOST]

    def used(self, tier: str) -> int:
        """Blocks of a tier that somebody uses."""
        return self.pools[tier].used

    def claim(self, sequences: int) -> int:
        first, self._claimed = self._claimed, self._claimed + sequences
        return first

    def allocate(self, indices: Sequence[int], expected: int, owner: int) -> list[int]:
        """As `BlockStore.allocate`.

        Each owner has a run of each tier, in which its blocks lie in order: what a pass reads is as
        long a run, whatever came when. Where others share a block that was made there, the next one
        lies elsewhere.
        """
        blocks: list[int] = []
        try:
            for index in indices:
                tier, number = self._place(index, expected)
                each = self.plan.blocks[tier] // self.plan.sequences
                wanted = owner % self.plan.sequences * each + min(number, each - 1)
                blocks.append(self._bases[tier] + self.pools[tier].take(wanted))
        except BaseException:
            self.release(blocks)
            raise
        return blocks

    def stands_for(self, index: int, expected: int) -> int:
        return self._bases[self._place(index, expected)[0]]

    def _place(self, index: int, expected: int) -> tuple[str, int]:
        """As `KVPlacement.place`, of a sequence that goes round where it has laps."""
        if 0 < self.plan.lap < expected:
            index, expected = index % self.plan.lap, self.plan.lap
        return self.placement.place(index, expected)

    def place(self, block: int) -> tuple[BlockPool, int]:
        tier = next(tier for tier in reversed(TIERS) if block >= self._bases[tier])
        return self.pools[tier], block - self._bases[tier]

    @property
    def in_place(self) -> bool:
        return self.spill is None and self.bounds is None

    def fill(self, layer: int, blocks: Sequence[int], fill: Fill) -> None:
        near: list[tuple[int, Tensor]] = []
        on_disk: list[tuple[int, int]] = []
        for i, (pool, local) in enumerate(map(self.place, blocks)):
            if pool.tier == DISK:
                on_disk.append((local, i))
            else:
                near.append((i, pool.layers[layer][local]))
        if near:
            places, records = [i for i, _ in near], [memory for _, memory in near]
            fill(places, records)
            self._keep_bounds(layer, [blocks[i] for i in places], records)
        on_disk.sort()
        for run in runs(enumerate(local for local, _ in on_disk)):
            neighbours = on_disk[run.at : run.at + run.count]
            for start in range(0, run.count, STAGE_BLOCKS):
                self._spill(layer, neighbours[start : start + STAGE_BLOCKS], fill)

    def read(self, layer: int, block: int) -> Tensor:
        pool, local = self.place(block)
        if pool.tier != DISK:
            return pool.layers[layer][local]
        assert self.spill is not None
        self._settle(layer, [local])
        memory = torch.empty(self.plan.stride, dtype=torch.uint8)
        self._clock.result(self.spill.read(self._offset(layer, local), memory))
        record = memory[: self.plan.record_bytes[layer]]
        return record.view(self.kv_heads[layer], self.forms[layer].nbytes)

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

    def copy_plan(self, blocks: Sequence[int], room: int = 0) -> CopyPlan:
        """The way of blocks that are not on the device to places of a ring slot, in their order.

        blocks: ascending. room: places that may stay without one of them, so that a read of a few
        blocks more saves another read.
        """
        room = max(room, len(blocks)) - len(blocks)
        widest = _READ_THROUGH // self.plan.stride
        placed: list[tuple[int, str, int]] = []
        at, before, following = -1, "", 0
        for pool, local in map(self.place, blocks):
            gap = local - following if pool.tier == before == DISK else 0
            between = gap if 0 < gap <= min(widest, room) else 0
            at, before, following, room = at + 1 + between, pool.tier, local + 1, room - between
            placed.append((at, pool.tier, local))

        def of(tier: str) -> tuple[Run, ...]:
            return runs((at, local) for at, there, local in placed if there == tier)

        on_disk = tuple(local for _, there, local in placed if there == DISK)
        return CopyPlan(at + 1, tuple(at for at, _, _ in placed), on_disk, of(DISK), of(HOST))

    def bring(self, layer: int, copy_plan: CopyPlan, memory: Tensor) -> list[Future[None]]:
        """Start bringing blocks of a layer into a ring slot."""
        stride, record = self.plan.stride, self.plan.record_bytes[layer]
        futures: list[Future[None]] = []
        self._settle(layer, copy_plan.on_disk)  # all, before anything comes into the slot
        if copy_plan.from_disk:
            assert self.spill is not None
            parts = [
                (
                    self._offset(layer, run.local),
                    memory[run.at * stride : (run.at + run.count) * stride],
                )
                for run in copy_plan.from_disk
            ]
            futures.append(self.spill.read_parts(parts))
        places = memory[: copy_plan.count * stride].view(copy_plan.count, stride)[:, :record]
        pool = self.pools[HOST].layers[layer].flatten(1)
        pairs = [
            (places[run.at : run.at + run.count], pool[run.local : run.local + run.count])
            for run in copy_plan.from_host
        ]
        if pairs:
            name = f"KV of layer {self._numbers[layer]}"
            futures.append(self._copies.submit(pairs, "host to device", name))
        return futures

    def bring_records(
        self, layer: int, blocks: Numbers, places: Numbers, wanted: Records, memory: Tensor
    ) -> list[Future[None]]:
        """Start bringing records of a layer to the places of their blocks in a ring slot.

        blocks, places: ascending. wanted: which records of each.
        """
        rows, heads = np.nonzero(wanted)
        numbers, nbytes = blocks[rows], self.forms[layer].nbytes
        inside = heads * nbytes
        dests = places[rows] * self.plan.stride + inside
        disk = int(np.count_nonzero(numbers < self._bases[HOST]))
        futures: list[Future[None]] = []
        if disk:
            assert self.spill is not None
            self._settle(layer, np.unique(numbers[:disk]).tolist())
            sources = self._offset(layer, 0) + numbers[:disk] * self.plan.stride + inside[:disk]
            found = record_runs(sources, dests[:disk], nbytes)
            futures.append(self.spill.read_runs(found, memory))
        if disk < len(numbers):
            pool, record = self.pools[HOST].layers[layer].flatten(), self.plan.record_bytes[layer]
            sources = (numbers[disk:] - self._bases[HOST]) * record + inside[disk:]
            found = record_runs(sources, dests[disk:], nbytes)
            move = partial(self._copies.copy_runs, found, memory, pool)
            moved = nbytes * (len(numbers) - disk)
            name = f"KV of layer {self._numbers[layer]}"
            futures.append(self._copies.call(move, moved, "host to device", name))
        return futures

    def _keep_bounds(self, layer: int, blocks: Sequence[int], records: Sequence[Tensor]) -> None:
        """Of those new blocks that will be brought to the device."""
        if self.bounds is not None:
            far = [i for i, block in enumerate(blocks) if block < self.plan.bounded]
            self.bounds.keep(layer, [blocks[i] for i in far], [records[i] for i in far])

    def _memory(self, arena: Arena, blocks: int) -> list[Tensor]:
        return [
            arena.alloc(blocks * heads * form.nbytes, f"KV blocks of layer {layer}").view(
                blocks, heads, form.nbytes
            )
            for layer, heads, form in zip(self._numbers, self.kv_heads, self.forms, strict=True)
        ]

    def _offset(self, layer: int, local: int) -> int:
        return self._spill_at + (layer * self.plan.blocks[DISK] + local) * self.plan.stride

    def _spill(self, layer: int, run: Sequence[tuple[int, int]], fill: Fill) -> None:
        """Write neighbouring blocks of a layer to disk; run: number there and place of each."""
        assert self.spill is not None
        buffers = self._staging.buffers
        stage, before = buffers[0]
        earlier = [self._writes.get((layer, local), before) for local, _ in run]
        self._clock.wait([before, *earlier])  # what failed is the blocks' own: see `_settle`
        memory = stage[: len(run) * self.plan.stride]
        shape = self.kv_heads[layer], self.forms[layer].nbytes
        records = memory.view(len(run), -1)[:, : self.plan.record_bytes[layer]]
        made = [record.view(shape) for record in records]
        fill([i for _, i in run], made)
        self._keep_bounds(layer, [self._bases[DISK] + local for local, _ in run], made)
        write = self.spill.write(self._offset(layer, run[0][0]), memory)
        buffers.popleft()
        buffers.append((stage, write))
        for local, _ in run:
            self._writes[layer, local] = write

    def _settle(self, layer: int, locals_: Iterable[int]) -> None:
        """Wait until these blocks are on disk. Raises, each time, why one of them is not."""
        if not self._writes:
            return
        for local in locals_:
            write = self._writes.get((layer, local))
            if write is not None:
                self._clock.result(write)
                del self._writes[layer, local]


class _TieredView(BlockView):
    """Tables of the blocks in place, and of those that go through the ring."""

    def __init__(
        self,
        store: TieredBlocks,
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
        self._fetches = LayerFetches(
            store.ring, lambda layer, slot: store.bring(layer, self._copy_plan, slot)
        )
        if sparse and store.bounds is not None and self.moves:
            self.chooses = True
            numbers = {block: block for block in moved}
            (table,) = self._tables(staged, numbers, "bounds")
            self._fetches = ChosenBlocks(
                store.ring, store.bounds, store.bring_records, moved, self._copy_plan.places, table
            )

    def told(self) -> tuple[int, ...]:
        far = [number for table in self._far for number in table.told()]
        return (*far, *told(self._near))

    def counters(self) -> list[Tensor]:
        return [table.positions for _, table in self._near]

    def prefetch(self, layer: int) -> None:
        if self.moves:
            self._fetches.prefetch(layer)

    def arrive(self, layer: int) -> int | None:
        return self._fetches.open(layer).data_ptr() if self.moves else None

    def open(self, layer: int) -> tuple[PackedTokens, ...]:
        store, form = self._store, self._store.forms[layer]
        parts = []
        if self._far:
            # All of the slot: kernels are told the same distances for any number of blocks.
            fetches, plan = self._fetches, store.plan
            slot = fetches.open(layer)[: plan.slot_bytes].view(-1, plan.stride)
            records = slot[:, : plan.record_bytes[layer]]
            blocks = records.unflatten(1, (store.kv_heads[layer], form.nbytes))
            bounds = fetches.of(layer) if isinstance(fetches, ChosenBlocks) else None
            parts += [PackedTokens(form, blocks, table, bounds) for table in self._far]
        for pool, table in self._near:
            parts.append(PackedTokens(form, pool.layers[layer], table))
        return tuple(parts)

    def close(self, layer: int) -> None:
        self._fetches.close(layer)

    def abandon(self) -> None:
        self._fetches.abandon()

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
