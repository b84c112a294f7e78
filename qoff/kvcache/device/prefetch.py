"""Offloaded blocks on their way to a GPU, for attention there, through a few slots.

The slots lie in one piece of memory behind the pools of all layers, and each layer's pool reaches
to its end: a block in a slot is a block of the pool with a number, like those that stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

from torch import Tensor

from qoff.kvcache.store.copy_plan import CopyPlan
from qoff.kvcache.store.placement import DISK, HOST
from qoff.kvcache.store.ring import BlockRing, Fetch
from qoff.kvcache.store.tiered import TieredBlocks
from qoff.memory.instrumentation import PLAIN, Instrumentation
from qoff.memory.io.copies import Copies

MOVE_ROWS = 16  # query rows of a sequence and KV head up to which the queries are moved instead


class BlockPrefetcher:
    """Brings offloaded blocks of a layer to consecutive numbers of its pool; from one thread.

    pools: of each layer, uint8 [blocks, kv_heads, form.nbytes], up to the end of one memory. slots:
    pieces of that memory, with room for `prefetched` blocks and one. bounces: for each, host memory
    for `from_disk` blocks that are read from disk. always: passes over offloaded blocks move them
    all; otherwise only those of many queries do, where they fit.
    """

    def __init__(
        self,
        offloaded: TieredBlocks,
        pools: Sequence[Tensor],
        slots: Sequence[Tensor],
        bounces: Sequence[Tensor],
        copies: Copies,
        *,
        prefetched: int,
        from_disk: int,
        always: bool,
        instrumentation: Instrumentation = PLAIN,
    ) -> None:
        self._offloaded, self._pools, self._copies = offloaded, pools, copies
        self._bounces = {
            slot.storage_offset(): bounce for slot, bounce in zip(slots, bounces, strict=True)
        }
        self._prefetched, self._from_disk = prefetched, from_disk
        self._always = always
        self.ring = BlockRing(slots, lambda: copies.alive, instrumentation)

    def takes(self, blocks: Sequence[int], rows: int) -> bool:
        """Whether a pass over these blocks of the offloaded store moves them to the device.

        rows: queries of a sequence that one KV head attends with. Few go to the blocks.
        """
        if not self._always and rows <= MOVE_ROWS:
            return False
        on_disk = sum(self._offloaded.tier(block) == DISK for block in blocks)
        fits = len(blocks) <= self._prefetched and on_disk <= self._from_disk
        assert fits or not self._always
        return fits

    def view(self, blocks: Sequence[int]) -> PrefetchedBlocks:
        """These blocks, ascending, for one forward pass."""
        from_disk = [block for block in blocks if self._offloaded.tier(block) == DISK]
        copy_plans = self._offloaded.copy_plan(blocks), self._offloaded.copy_plan(from_disk)
        return PrefetchedBlocks(self, tuple(blocks), *copy_plans)

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
        places = [at for run in copy_plan.from_disk for at in range(run.at, run.at + run.count)]
        pairs = [
            (dest[at], bounce[i * stride : i * stride + record]) for i, at in enumerate(places)
        ]
        pool = offloaded.pools[HOST][layer].flatten(1)
        for run in copy_plan.from_host:
            source = pool[run.local : run.local + run.count]
            pairs.append((dest[run.at : run.at + run.count], source))

        def move() -> None:
            for read in reads:
                read.result()
            copies.copy(pairs)

        nbytes = copy_plan.count * record
        return [*reads, copies.call(move, nbytes, "host to device", f"KV of layer {layer}")]


class PrefetchedBlocks:
    """Offloaded blocks of one forward pass, which come to the device layer by layer."""

    def __init__(
        self,
        prefetcher: BlockPrefetcher,
        blocks: tuple[int, ...],
        copy_plan: CopyPlan,
        to_bounce: CopyPlan,
    ) -> None:
        self._prefetcher, self._copy_plans = prefetcher, (copy_plan, to_bounce)
        self.blocks = blocks
        self._fetches: dict[int, Fetch] = {}

    def prefetch(self, layer: int) -> None:
        """Start to bring the blocks of a layer, if a slot is free."""
        if not self._fetched(layer):
            self._fetch(layer, must=False)

    def open(self, layer: int) -> int:
        """Wait for the blocks of a layer; the number of the first, valid until `close`."""
        if not self._fetched(layer):
            self._fetch(layer, must=True)
        return self._prefetcher.first(layer, self._prefetcher.ring.use(self._fetches[layer]))

    def close(self, layer: int) -> None:
        """The layer's attention is on its way."""
        fetch = self._fetches.pop(layer, None)
        if fetch is not None:
            self._prefetcher.ring.drop(fetch)

    def abandon(self) -> None:
        """The pass will not go on."""
        for layer in list(self._fetches):
            self.close(layer)

    def _fetched(self, layer: int) -> bool:
        fetch = self._fetches.get(layer)
        return fetch is not None and self._prefetcher.ring.holds(fetch)

    def _fetch(self, layer: int, must: bool) -> None:
        fetch = self._prefetcher.ring.start(
            lambda slot: self._prefetcher.bring(layer, *self._copy_plans, slot), must
        )
        if fetch is not None:
            self._fetches[layer] = fetch
