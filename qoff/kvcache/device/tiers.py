"""Packed blocks of a GPU on three tiers, in memory of a fixed size, for all caches of a run."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from qoff.kernels.layout.kv_format import KVFormat
from qoff.kvcache.store.placement import DEVICE, HOST, KVPlacement
from qoff.kvcache.store.tiered import TieredBlocks
from qoff.memory.arena import PAGE, Arena, round_up
from qoff.memory.instrumentation import PLAIN, Instrumentation
from qoff.memory.io.copies import Copies
from qoff.memory.io.spill import SpillFile

from .blocks import DeviceBlocks
from .plan import PREFETCH_SLOTS, DeviceBlockPlan
from .prefetch import BlockPrefetcher
from .write_back import WRITE_BACK_BUFFERS, WriteBackBuffer, WriteBackQueue


def open_device_blocks(
    forms: Sequence[KVFormat],
    kv_heads: Sequence[int],
    plan: DeviceBlockPlan,
    placement: KVPlacement,
    arenas: dict[str, Arena],
    copies: Copies,
    spill: SpillFile | None,
    *,
    always_move: bool,
    instrumentation: Instrumentation = PLAIN,
) -> DeviceBlocks:
    """Take what `plan` says from both arenas, and from the start of `spill`.

    always_move: attention to offloaded blocks is on the device, never where they lie. copies: to
    the device. Raises BudgetError.
    """
    pools, slots = _device_memory(kv_heads, plan, arenas[DEVICE])
    device = pools[0].device
    if placement.device_fraction >= 1:
        return DeviceBlocks(
            forms,
            kv_heads,
            device,
            plan.resident,
            placement,
            pools=pools,
            instrumentation=instrumentation,
        )
    host = arenas[HOST]
    ring_and_pools = {DEVICE: host, HOST: host}  # what is resident the CPU is in its memory
    offloaded = TieredBlocks(
        forms,
        kv_heads,
        plan.offloaded,
        placement,
        ring_and_pools,
        copies,
        spill,
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
        prefetcher = BlockPrefetcher(
            offloaded,
            pools,
            slots,
            [host.alloc(plan.bounce_bytes, "KV blocks from disk") for _ in slots],
            copies,
            prefetched=plan.prefetched,
            from_disk=plan.prefetched_from_disk,
            always=always_move,
            instrumentation=instrumentation,
        )
    return DeviceBlocks(
        forms,
        kv_heads,
        device,
        plan.resident,
        placement,
        offloaded,
        pools=pools,
        write_back=WriteBackQueue(offloaded, device, instrumentation, buffers),
        prefetcher=prefetcher,
        instrumentation=instrumentation,
    )


def _device_memory(
    kv_heads: Sequence[int], plan: DeviceBlockPlan, arena: Arena
) -> tuple[list[Tensor], list[Tensor]]:
    """The pools of all layers, and behind them the prefetch slots, to whose end pools reach."""
    count = PREFETCH_SLOTS if plan.prefetched else 0
    memory = arena.alloc(plan.pool_bytes + count * plan.slot_bytes, "KV blocks")
    pools: list[Tensor] = []
    start = 0
    for heads, record in zip(kv_heads, plan.offloaded.record_bytes, strict=True):
        blocks = (len(memory) - start) // record if count else plan.resident
        pools.append(memory[start : start + blocks * record].view(blocks, heads, record // heads))
        start += round_up(plan.resident * record, PAGE)
    return pools, list(memory[start:].split(plan.slot_bytes)) if count else []
