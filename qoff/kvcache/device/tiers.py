"""Packed blocks of a GPU on three tiers, in memory of a fixed size, for all caches of a run."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from qoff.kernels.layout.kv_format import KVFormat
from qoff.kvcache.store.placement import DEVICE, HOST, KVPlacement
from qoff.kvcache.store.tiered import TieredBlocks
from qoff.memory.arena import PAGE, Arena, round_up
from qoff.memory.io.copies import Copies
from qoff.memory.io.spill import SpillFile

from .blocks import DeviceBlocks
from .plan import STAGE_SLOTS, DeviceBlockPlan
from .prefetch import BlockStage
from .write_back import PLACES, Outbox, Place


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
    poison: bool = False,
) -> DeviceBlocks:
    """Take what `plan` says from both arenas, and from the start of `spill`.

    always_move: attention to far blocks is on the device, never where they lie. copies: to the
    device. poison: memory that holds no block is NaN. Raises BudgetError.
    """
    pools, slots = _device_memory(kv_heads, plan, arenas[DEVICE])
    device = pools[0].device
    if placement.device_fraction >= 1:
        return DeviceBlocks(
            forms, kv_heads, device, plan.near, placement, pools=pools, poison=poison
        )
    host = arenas[HOST]
    ring_and_pools = {DEVICE: host, HOST: host}  # what is near the CPU is in its memory
    far = TieredBlocks(
        forms, kv_heads, plan.far, placement, ring_and_pools, copies, spill, poison=poison
    )
    places = [
        Place(
            arenas[DEVICE].alloc(plan.parcel_bytes, "new KV blocks"),
            host.alloc(plan.parcel_bytes, "new KV blocks"),
        )
        for _ in range(PLACES)
    ]
    stage = None
    if slots:
        stage = BlockStage(
            far,
            pools,
            slots,
            [host.alloc(plan.bounce_bytes, "KV blocks from disk") for _ in slots],
            copies,
            staged=plan.staged,
            from_disk=plan.staged_from_disk,
            always=always_move,
            poison=poison,
        )
    return DeviceBlocks(
        forms,
        kv_heads,
        device,
        plan.near,
        placement,
        far,
        pools=pools,
        outbox=Outbox(far, device, poison, places),
        stage=stage,
        poison=poison,
    )


def _device_memory(
    kv_heads: Sequence[int], plan: DeviceBlockPlan, arena: Arena
) -> tuple[list[Tensor], list[Tensor]]:
    """The pools of all layers, and behind them the slots of the stage, to whose end pools reach."""
    count = STAGE_SLOTS if plan.staged else 0
    memory = arena.alloc(plan.pool_bytes + count * plan.slot_bytes, "KV blocks")
    pools: list[Tensor] = []
    start = 0
    for heads, record in zip(kv_heads, plan.far.record_bytes, strict=True):
        blocks = (len(memory) - start) // record if count else plan.near
        pools.append(memory[start : start + blocks * record].view(blocks, heads, record // heads))
        start += round_up(plan.near * record, PAGE)
    return pools, list(memory[start:].split(plan.slot_bytes)) if count else []
