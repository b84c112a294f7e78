"""Numbers and memory of the packed blocks of caches on a GPU, some of which lie elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from qoff.kernels.layout.kv_format import KVFormat
from qoff.kernels.layout.ragged import Ragged, Span
from qoff.kvcache.store.base import Blocks, BlockView
from qoff.kvcache.store.placement import DEVICE, HOST, KVPlacement
from qoff.kvcache.store.pool import BlockPool
from qoff.kvcache.store.sparse import BlockBounds
from qoff.kvcache.store.tiered import TieredBlocks
from qoff.memory.arena import PAGE, Arena, round_up
from qoff.memory.instrumentation import PLAIN, Instrumentation
from qoff.memory.io.copies import Copies
from qoff.memory.io.spill import SpillFile

from .plan import PREFETCH_SLOTS, DeviceBlockPlan
from .prefetch import BlockPrefetcher, PrefetchedBlocks
from .write_back import WRITE_BACK_BUFFERS, WriteBackBuffer, WriteBackQueue


class DeviceBlocks(Blocks):
    """Packed blocks by number: those of `pool` on the device, and negative ones elsewhere.

    offloaded: where blocks lie that `placement` leaves off the device; block b there is -1 - b
    here. They go there through `write_back`, and come back through `prefetcher`, if there is one.
    bounds: of the K of offloaded blocks, on the device, where a part of them is attended to.
    """

    def __init__(
        self,
        forms: Sequence[KVFormat],
        pool: BlockPool,
        placement: KVPlacement | None = None,
        offloaded: TieredBlocks | None = None,
        write_back: WriteBackQueue | None = None,
        prefetcher: BlockPrefetcher | None = None,
        bounds: BlockBounds | None = None,
    ) -> None:
        self.forms, self.pool = tuple(forms), pool
        self.placement = placement or KVPlacement()
        self.offloaded, self.prefetcher = offloaded, prefetcher
        self.write_back, self.bounds = write_back, bounds

    @classmethod
    def growing(
        cls, forms: Sequence[KVFormat], kv_heads: Sequence[int], count: int, device: torch.device
    ) -> DeviceBlocks:
        """Blocks that are all on the device, with room for so many at first."""
        return cls(forms, BlockPool.growing(DEVICE, forms, kv_heads, count, device))

    @property
    def device(self) -> torch.device:
        return self.pool.layers[0].device

    @property
    def nbytes(self) -> int:
        bounds = 0 if self.bounds is None else sum(x.nbytes for x in self.bounds.layers)
        return self.pool.nbytes + bounds + (0 if self.offloaded is None else self.offloaded.nbytes)

    def view(
        self, rows: Sequence[Sequence[int]], spans: Sequence[Span], group: int, *, sparse: bool
    ) -> BlockView | PrefetchedBlocks | None:
        """What brings offloaded blocks, `rows` of each slot, for a pass; None where there are none.

        It brings them to where the CPU attends to them, or to the device. spans: in the order of
        the slots. group: query heads of a KV head. sparse: attention chooses among blocks.
        """
        if self.offloaded is None or not any(rows):
            return None
        blocks = sorted({block for row in rows for block in row})
        queries = group * max(span.count for span in spans)
        prefetcher = self.prefetcher
        if prefetcher is not None and not sparse and prefetcher.takes(blocks, queries):
            return prefetcher.view(blocks)
        ordered, row = [], 0  # the view's rows are in the order of the slots
        for span in spans:
            ordered.append(replace(span, start=row))
            row += span.count
        return self.offloaded.view(rows, Ragged(tuple(ordered)), 0, sparse=sparse)

    def bytes_for(self, blocks: int) -> int:
        return self.nbytes - self.pool.nbytes + self.pool.bytes_for(blocks)

    def reserve(self, blocks: int) -> None:
        self.pool.reserve(blocks)

    def claim(self, sequences: int) -> int:
        return 0 if self.offloaded is None else self.offloaded.claim(sequences)

    def place(self, block: int) -> tuple[BlockPool, int]:
        if block >= 0:
            return self.pool, block
        assert self.offloaded is not None
        return self.offloaded.place(-1 - block)

    def allocate(
        self, indices: Sequence[int], expected: int, owner: int, on_device: bool = False
    ) -> list[int]:
        """As `BlockStore.allocate`; on_device: whatever the placement says."""
        blocks: list[int] = []
        if self.offloaded is not None and not on_device:
            count = sum(self.placement.tier(index, expected) != DEVICE for index in indices)
            there = self.offloaded.allocate(indices[:count], expected, owner)
            blocks = [-1 - block for block in there]
        try:
            return blocks + self.pool.allocate(len(indices) - len(blocks))
        except BaseException:
            self.release(blocks)
            raise

    def read(self, layer: int, block: int) -> Tensor:
        """Return a block of a layer on the device, uint8 [kv_heads, form.nbytes]."""
        if block >= 0:
            return self.pool.layers[layer][block]
        assert self.offloaded is not None
        return self.offloaded.read(layer, -1 - block).to(self.device)


def open_device_blocks(
    forms: Sequence[KVFormat],
    kv_heads: Sequence[int],
    plan: DeviceBlockPlan,
    placement: KVPlacement,
    arenas: dict[str, Arena],
    copies: Copies,
    spill: SpillFile | None,
    *,
    layers: Sequence[int],
    always_move: bool,
    instrumentation: Instrumentation = PLAIN,
    new_queue: Callable[..., WriteBackQueue] = WriteBackQueue,
) -> DeviceBlocks:
    """Take what `plan` says from both arenas, and from the start of `spill`.

    layers: their numbers in the model. always_move: attention to offloaded blocks is on the device,
    never where they lie. copies: to the device. new_queue: makes what takes new blocks from there.
    Raises BudgetError.
    """
    memory, slots = _device_memory(kv_heads, plan, arenas[DEVICE])
    pool = BlockPool(DEVICE, memory, plan.resident, poison=instrumentation.poison)
    if placement.device_fraction >= 1:
        return DeviceBlocks(forms, pool, placement)
    host = arenas[HOST]
    offloaded = TieredBlocks(
        forms,
        kv_heads,
        plan.offloaded,
        placement,
        {DEVICE: host, HOST: host},  # the ring is in host memory
        copies,
        spill,
        layers=layers,
        instrumentation=instrumentation,
    )
    buffers = [
        WriteBackBuffer(
            arenas[DEVICE].alloc(plan.write_back_bytes, "new KV blocks"),
            host.alloc(plan.write_back_bytes, "new KV blocks"),
        )
        for _ in range(WRITE_BACK_BUFFERS)
    ]
    prefetcher = None
    if slots:
        bounces = [host.alloc(plan.bounce_bytes, "KV blocks from disk") for _ in slots]
        prefetcher = BlockPrefetcher(
            offloaded,
            memory,
            slots,
            bounces,
            copies,
            plan,
            always=always_move,
            instrumentation=instrumentation,
        )
    write_back = new_queue(offloaded, buffers, instrumentation)
    bounds = None
    if plan.bound_bytes:
        bounds = BlockBounds(forms, kv_heads, plan.offloaded_blocks, arenas[DEVICE])
    return DeviceBlocks(forms, pool, placement, offloaded, write_back, prefetcher, bounds)


def _device_memory(
    kv_heads: Sequence[int], plan: DeviceBlockPlan, arena: Arena
) -> tuple[list[Tensor], list[Tensor]]:
    """The pools of all layers, and behind them the prefetch slots, to whose end pools reach."""
    count = PREFETCH_SLOTS if plan.prefetched else 0
    memory = arena.alloc(plan.pool_bytes + count * plan.slot_bytes, "KV blocks")
    records = plan.offloaded.record_bytes
    sizes = [round_up(plan.resident * record, PAGE) for record in records]
    pools: list[Tensor] = []
    for heads, record, start in zip(kv_heads, records, accumulate([0, *sizes[:-1]]), strict=True):
        blocks = (len(memory) - start) // record if count else plan.resident
        pools.append(memory[start : start + blocks * record].view(blocks, heads, record // heads))
    return pools, list(memory[plan.pool_bytes :].split(plan.slot_bytes)) if count else []
