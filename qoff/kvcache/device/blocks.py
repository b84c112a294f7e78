"""Numbers and memory of the packed blocks of caches on a GPU, some of which lie elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from qoff.errors import BudgetError
from qoff.kernels.layout.kv_format import KVFormat
from qoff.kvcache.store.allocator import BlockAllocator
from qoff.kvcache.store.base import BlockStore
from qoff.kvcache.store.placement import DEVICE, KVPlacement
from qoff.kvcache.store.tiered import TieredBlocks
from qoff.memory.instrumentation import PLAIN, Instrumentation

from .prefetch import BlockPrefetcher
from .write_back import WriteBackQueue

_GROWTH_BLOCKS = 16


class DeviceBlocks:
    """Packed blocks by number, one pool a layer.

    The pools grow as blocks are asked for, unless they are given: `pools`, of at least `blocks`
    blocks, stay as they are. offloaded: where blocks lie that `placement` leaves off the device;
    block b there is -1 - b here. They go there through `write_back`, and come back through
    `prefetcher`, if there is one.
    """

    def __init__(
        self,
        forms: Sequence[KVFormat],
        kv_heads: Sequence[int],
        device: torch.device,
        blocks: int = 0,
        placement: KVPlacement | None = None,
        offloaded: BlockStore | None = None,
        *,
        pools: Sequence[Tensor] | None = None,
        write_back: WriteBackQueue | None = None,
        prefetcher: BlockPrefetcher | None = None,
        instrumentation: Instrumentation = PLAIN,
    ) -> None:
        self.forms = tuple(forms)
        self.device = device
        self.placement = placement or KVPlacement()
        self.offloaded, self.prefetcher = offloaded, prefetcher
        self.write_back = write_back
        if offloaded is not None and write_back is None:
            self.write_back = WriteBackQueue(offloaded, device, instrumentation)
        self._poison = instrumentation.poison
        self._grows = pools is None
        self._allocator = BlockAllocator(blocks)
        self.pools = list(pools or ()) or [
            torch.empty(blocks, heads, form.nbytes, dtype=torch.uint8, device=device)
            for heads, form in zip(kv_heads, self.forms, strict=True)
        ]
        if self._poison:
            self._wipe(range(blocks))

    @property
    def nbytes(self) -> int:
        """Bytes on the device and in the store of offloaded blocks."""
        return sum(pool.nbytes for pool in self.pools) + (
            self.offloaded.nbytes if self.offloaded else 0
        )

    @property
    def used(self) -> int:
        """Blocks on the device that somebody uses."""
        return self._allocator.capacity - self._allocator.free

    def users(self, block: int) -> int:
        """How many sequences use a block."""
        if block >= 0:
            return self._allocator.users(block)
        assert isinstance(self.offloaded, TieredBlocks)
        return self.offloaded.users(-1 - block)

    def tier(self, block: int) -> str:
        """Where a block lies."""
        if block >= 0:
            return DEVICE
        assert isinstance(self.offloaded, TieredBlocks)
        return self.offloaded.tier(-1 - block)

    def allocate(self, indices: Sequence[int], expected: int, on_device: bool = False) -> list[int]:
        """Return blocks, each with one user, for these places in a sequence that will have so many.

        on_device: whatever the placement says. Raises BudgetError for blocks there are not.
        """
        count = 0
        if self.offloaded is not None and not on_device:
            count = sum(self.placement.tier(index, expected) != DEVICE for index in indices)
        if count < len(indices):
            self._make_room(len(indices) - count)
        blocks: list[int] = []
        if self.offloaded is not None and count:
            blocks = [-1 - block for block in self.offloaded.allocate(indices[:count], expected)]
        return blocks + [self._allocator.allocate() for _ in indices[count:]]

    def share(self, blocks: Iterable[int]) -> None:
        """Count one user more of each block."""
        resident, offloaded = _parted(blocks)
        self._allocator.share(resident)
        if self.offloaded is not None:
            self.offloaded.share(offloaded)

    def release(self, blocks: Iterable[int]) -> None:
        """Count one user less of each block; without users it is free."""
        resident, offloaded = _parted(blocks)
        self._allocator.release(resident)
        if self._poison:
            self._wipe([block for block in resident if not self._allocator.users(block)])
        if self.offloaded is not None:
            self.offloaded.release(offloaded)

    def read(self, layer: int, block: int) -> Tensor:
        """Return a block of a layer on the device, uint8 [kv_heads, form.nbytes]."""
        if block >= 0:
            return self.pools[layer][block]
        assert self.offloaded is not None
        return self.offloaded.read(layer, -1 - block).to(self.device)

    def bytes_for(self, blocks: int) -> int:
        """The most bytes allocated while the device's pools grow to `blocks` blocks."""
        if not self._grows or blocks <= self._allocator.capacity:
            return self.nbytes
        each = sum(pool.shape[1] * pool.shape[2] for pool in self.pools)  # uint8
        return blocks * each + max(pool.nbytes for pool in self.pools)

    def reserve(self, blocks: int) -> None:
        """Grow the device's pools to `blocks` blocks, used ones included."""
        if not self._grows or blocks <= self._allocator.capacity:
            return
        for layer, pool in enumerate(self.pools):
            if len(pool) < blocks:  # not yet, in a growth that ran out of memory
                grown = pool.new_empty(blocks, *pool.shape[1:])
                grown[: len(pool)] = pool
                self.pools[layer] = grown
        self._allocator.grow(blocks)

    def _make_room(self, count: int) -> None:
        if count <= self._allocator.free:
            return
        capacity = self._allocator.capacity
        if not self._grows:
            raise BudgetError(f"all {capacity} KV blocks of the device are in use")
        self.reserve(capacity + max(count, _GROWTH_BLOCKS, capacity // 2))

    def _wipe(self, blocks: Sequence[int]) -> None:
        for pool in self.pools:
            pool[list(blocks)] = 0xFF


def offloaded_blocks(blocks: Sequence[int]) -> list[int]:
    """The offloaded ones among a sequence's blocks, its oldest, by their numbers in their store."""
    return _parted(blocks)[1]


def _parted(blocks: Iterable[int]) -> tuple[list[int], list[int]]:
    """Numbers of the blocks on the device, and of the others in their store."""
    resident: list[int] = []
    offloaded: list[int] = []
    for block in blocks:
        if block < 0:
            offloaded.append(-1 - block)
        else:
            resident.append(block)
    return resident, offloaded
