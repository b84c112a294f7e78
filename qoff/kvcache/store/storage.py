"""Packed blocks on device, host and disk: where they lie, and what moves them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from functools import partial

import numpy as np
import torch
from torch import Tensor

from qoff.kernels.layout.kv_format import KVFormat
from qoff.memory.arena import Arena
from qoff.memory.instrumentation import PLAIN, Instrumentation
from qoff.memory.io.copies import Copies
from qoff.memory.io.spill import SpillFile

from .base import BlockStore, Fill
from .placement import DEVICE, DISK, HOST, TIERS, KVPlacement
from .plan import STAGE_BLOCKS, BlockPlan
from .pool import BlockPool
from .ring import CopyPlan, Run, runs
from .sparse import BlockBounds, LateChoices, Numbers, Records, record_runs
from .staging import Staging
from .sweep import BlockSweep, Bringing

READ_THROUGH = 128 << 10  # bytes between two runs that take as long as another read


class BlockStorage(BlockStore):
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
        self.choices: LateChoices | None = None
        if plan.chosen:
            self.choices = LateChoices(kv_heads, plan.chosen, arenas[DEVICE])
            if plan.bound_bytes:
                self.bounds = BlockBounds(forms, kv_heads, plan.chosen, arenas[DEVICE])
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
        return self.spill is None and self.choices is None

    @property
    def memory(self) -> Sequence[Tensor]:
        return [layer for pool in self.pools.values() for layer in pool.layers]

    def fill(self, layer: int, blocks: Sequence[int], fill: Fill) -> None:
        by_tier: dict[str, list[tuple[int, int]]] = {}
        for i, (pool, local) in enumerate(map(self.place, blocks)):
            by_tier.setdefault(pool.tier, []).append((local, i))
        on_disk = by_tier.pop(DISK, [])
        for tier, near in by_tier.items():
            numbers, places = [local for local, _ in near], [i for _, i in near]
            memory = self.pools[tier].layers[layer]
            fill(places, memory, numbers)
            self._new(layer, [blocks[i] for i in places], memory, numbers)
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

    def copy_plan(self, blocks: Sequence[int], room: int = 0) -> CopyPlan:
        """The way of blocks that are not on the device to places of a ring slot, in their order.

        blocks: ascending. room: places that may stay without one of them, so that a read of a few
        blocks more saves another read.
        """
        room = max(room, len(blocks)) - len(blocks)
        widest = READ_THROUGH // self.plan.stride
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
        futures: list[Future[None]] = []
        parts = self.reads(layer, copy_plan, memory)
        if parts:
            assert self.spill is not None
            futures.append(self.spill.read_parts(parts))
        places = self.records(layer, memory)
        pool = self.pools[HOST].layers[layer].flatten(1)
        pairs = [
            (places[run.at : run.at + run.count], pool[run.local : run.local + run.count])
            for run in copy_plan.from_host
        ]
        if pairs:
            name = f"KV of layer {self._numbers[layer]}"
            futures.append(self._copies.submit(pairs, "host to device", name))
        return futures

    def reads(self, layer: int, copy_plan: CopyPlan, memory: Tensor) -> list[tuple[int, Tensor]]:
        """What of a layer is to be read from the spill file into a ring slot.

        All of it has been written, and nothing may come to the slot before that.
        """
        self._settle(layer, copy_plan.on_disk)
        stride = self.plan.stride
        return [
            (
                self._offset(layer, run.local),
                memory[run.at * stride : (run.at + run.count) * stride],
            )
            for run in copy_plan.from_disk
        ]

    def bringing(
        self, layer: int, copy_plan: CopyPlan, memory: Tensor, table: Tensor | None
    ) -> Bringing:
        """How blocks of a layer come to a ring slot in a sweep.

        table: of the blocks in host memory, as `copy_rows` has it.
        """
        copied = None
        if table is not None:
            places = self.records(layer, memory)
            copied = places, self.pools[HOST].layers[layer].flatten(1), table
        return Bringing(self.reads(layer, copy_plan, memory), copied)

    def records(self, layer: int, memory: Tensor) -> Tensor:
        """All places of a ring slot, uint8 [ring_blocks, bytes of a record of the layer].

        All of the slot: kernels are told the same distances for any number of blocks.
        """
        plan = self.plan
        return memory[: plan.slot_bytes].view(-1, plan.stride)[:, : plan.record_bytes[layer]]

    def sweep(self) -> BlockSweep | None:
        """Begin a sweep over the ring, if nobody watches what is moved, and all slots are free."""
        if not self._copies.unwatched or not self.ring.idle:
            return None
        return BlockSweep(self.ring, self._copies, self.spill)

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

    def _new(
        self, layer: int, blocks: Sequence[int], memory: Tensor, numbers: Sequence[int]
    ) -> None:
        """Be ready to choose from those new blocks that will be brought to the device.

        numbers: in the memory.
        """
        if self.choices is None:
            return
        far = [i for i, block in enumerate(blocks) if block < self.plan.chosen]
        made = [blocks[i] for i in far]
        self.choices.forget(layer, made)
        if self.bounds is not None:
            self.bounds.keep(layer, made, [memory[numbers[i]] for i in far])

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
        shape, numbers = (self.kv_heads[layer], self.forms[layer].nbytes), range(len(run))
        records = memory.view(len(run), -1)[:, : self.plan.record_bytes[layer]].unflatten(1, shape)
        fill([i for _, i in run], records, numbers)
        self._new(layer, [self._bases[DISK] + local for local, _ in run], records, numbers)
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
