"""Offloaded blocks on their way to a GPU, for attention there, through a few slots.

The slots lie in one piece of memory behind the pools of all layers, and each layer's pool reaches
to its end: a block in a slot is a block of the pool with a number, like those that stay.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from functools import partial

import torch
from torch import Tensor

from qoff.kvcache.store.placement import DISK, HOST
from qoff.kvcache.store.ring import BlockRing, CopyPlan, LayerFetches
from qoff.kvcache.store.tiered import TieredBlocks
from qoff.memory.instrumentation import PLAIN, Instrumentation
from qoff.memory.io.copies import Copies

from .plan import DeviceBlockPlan
from .tables import host_memory

MOVE_ROWS = 16  # query rows of a sequence and KV head up to which the queries are moved instead


class BlockPrefetcher:
    """Brings offloaded blocks of a layer to consecutive numbers of its pool; from one thread.

    pools: of each layer, uint8 [blocks, kv_heads, form.nbytes], up to the end of one memory. slots:
    pieces of that memory, as long as `plan` says. bounces: for each, host memory for blocks that
    are read from disk. always: passes over offloaded blocks move them all; otherwise only those of
    many queries do, where they fit.
    """

    def __init__(
        self,
        offloaded: TieredBlocks,
        pools: Sequence[Tensor],
        slots: Sequence[Tensor],
        bounces: Sequence[Tensor],
        copies: Copies,
        plan: DeviceBlockPlan,
        *,
        always: bool,
        instrumentation: Instrumentation = PLAIN,
    ) -> None:
        self._offloaded, self._pools, self._copies = offloaded, pools, copies
        self._bounces = {
            slot.storage_offset(): bounce for slot, bounce in zip(slots, bounces, strict=True)
        }
        self._plan, self._always = plan, always
        self.ring = BlockRing(slots, lambda: copies.alive, instrumentation)

    def takes(self, blocks: Sequence[int], rows: int) -> bool:
        """Whether a pass over these blocks of the offloaded store moves them to the device.

        rows: queries of a sequence that one KV head attends with. Few go to the blocks.
        """
        if not self._always and rows <= MOVE_ROWS:
            return False
        on_disk, plan = len(self._on_disk(blocks)), self._plan
        fits = len(blocks) <= plan.prefetched and on_disk <= plan.prefetched_from_disk
        assert fits or not self._always
        return fits

    def view(self, blocks: Sequence[int]) -> PrefetchedBlocks:
        """These blocks, ascending, for one forward pass."""
        copy_plan = self._offloaded.copy_plan(blocks)
        return PrefetchedBlocks(
            self, blocks, copy_plan, self._offloaded.copy_plan(self._on_disk(blocks))
        )

    def first(self, layer: int, slot: Tensor) -> int:
        """The number in a layer's pool of the first block of a slot."""
        pool = self._pools[layer]
        between = slot.storage_offset() - pool.storage_offset()
        return -(-between // pool.stride(0))

    def bring(
        self, layer: int, copy_plan: CopyPlan, to_bounce: CopyPlan, slot: Tensor
    ) -> list[Future[None]]:
        """Start to bring blocks of a layer into a slot, one after another.

        copy_plan: of all of them; to_bounce: of those that are read from disk, to the bounce
        buffer.
        """
        offloaded, copies = self._offloaded, self._copies
        first = self.first(layer, slot)
        dest = self._pools[layer][first : first + copy_plan.count].flatten(1)
        bounce = self._bounces[slot.storage_offset()]
        reads = offloaded.bring(layer, to_bounce, bounce)
        stride, record = offloaded.plan.stride, offloaded.plan.record_bytes[layer]
        count = to_bounce.count
        read = bounce[: count * stride].view(count, stride)[:, :record]
        pool = offloaded.pools[HOST].layers[layer].flatten(1)
        nbytes = copy_plan.count * record
        move = partial(copies.copy, _pairs(copy_plan, dest, read, pool))
        name = f"KV of layer {layer}"
        return [*reads, copies.call(move, nbytes, "host to device", name, reads)]

    def _on_disk(self, blocks: Sequence[int]) -> list[int]:
        return [block for block in blocks if self._offloaded.tier(block) == DISK]


def _pairs(
    copy_plan: CopyPlan, dest: Tensor, read: Tensor, pool: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Where blocks come to and from, each the same memory in one piece; made as it is copied.

    dest, read, pool: records of a block, uint8 [blocks, bytes], of all of them in their places, of
    those from disk one after another, and of those in host memory.
    """
    done = 0
    for run in copy_plan.from_disk:
        into, source = dest[run.at : run.at + run.count], read[done : done + run.count]
        if source.is_contiguous():
            yield into, source
        else:  # records end before whole pages do
            yield from zip(into.unbind(), source.unbind(), strict=True)
        done += run.count
    for run in copy_plan.from_host:
        yield dest[run.at : run.at + run.count], pool[run.local : run.local + run.count]


class PrefetchedBlocks(LayerFetches):
    """Offloaded blocks of one forward pass, which come to the device layer by layer."""

    def __init__(
        self,
        prefetcher: BlockPrefetcher,
        blocks: Sequence[int],
        copy_plan: CopyPlan,
        to_bounce: CopyPlan,
    ) -> None:
        super().__init__(
            prefetcher.ring,
            lambda layer, slot: prefetcher.bring(layer, copy_plan, to_bounce, slot),
        )
        self._prefetcher, self.blocks = prefetcher, blocks

    def first(self, layer: int) -> int:
        """Open a layer; the number of its first block, valid until `close`."""
        return self._prefetcher.first(layer, self.open(layer))

    def places(
        self, rows: Sequence[Sequence[int]], shape: torch.Size, device: torch.device
    ) -> Tensor:
        """The place in a slot of each block, `rows` of each sequence, on the device.

        int32 of the shape of the block table; -1 for blocks that are not moved.
        """
        place = {block: i for i, block in enumerate(self.blocks)}
        table = host_memory(shape.numel(), torch.int32, device).view(shape).fill_(-1)
        for entries, row in zip(table, rows, strict=True):
            entries[: len(row)] = torch.tensor([place[block] for block in row], dtype=torch.int32)
        return table.to(device, non_blocking=True)
