"""Sizes of the packed blocks of a GPU and of what they pass through on either side of the link."""

from __future__ import annotations

from dataclasses import dataclass

from qoff.kvcache.groups import LayerGroup
from qoff.kvcache.store.placement import DEVICE, DISK, HOST
from qoff.kvcache.store.plan import BlockPlan
from qoff.memory.arena import PAGE, round_up

from .write_back import WRITE_BACK_BUFFERS

PREFETCH_SLOTS = 2  # one is filled while another is attended to


@dataclass(frozen=True)
class DeviceBlockPlan:
    """How many blocks there is room for.

    resident: on the device. offloaded: those in host memory and on disk, with nothing on the
    device; its ring is in host memory. prefetched: offloaded blocks of a pass that can be moved to
    the device together, `prefetched_from_disk` of them from disk. write_back: most new offloaded
    blocks of a pass. bound_bytes: of each layer, K's bounds of an offloaded block, which are on the
    device; none for dense attention.
    """

    resident: int
    offloaded: BlockPlan
    prefetched: int = 0
    prefetched_from_disk: int = 0
    write_back: int = 0
    bound_bytes: tuple[int, ...] = ()

    @property
    def offloaded_blocks(self) -> int:
        """How many blocks there is room for elsewhere."""
        return self.offloaded.blocks[HOST] + self.offloaded.blocks[DISK]

    @property
    def pool_bytes(self) -> int:
        """Bytes of the blocks on the device, all layers."""
        return sum(round_up(self.resident * nbytes, PAGE) for nbytes in self.offloaded.record_bytes)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a prefetch slot, with one block more: each layer's begin where they fit."""
        return self._whole(self.prefetched + 1) if self.prefetched else 0

    @property
    def bounce_bytes(self) -> int:
        """Bytes of host memory that a slot's blocks from disk pass through."""
        return self.prefetched_from_disk * self.offloaded.stride

    @property
    def write_back_bytes(self) -> int:
        """Bytes of a write-back buffer, on either side."""
        return self._whole(self.write_back)

    def tier_bytes(self) -> dict[str, dict[str, int]]:
        """Bytes by tier and purpose."""
        offloaded = self.offloaded.tier_bytes()
        write_backs = WRITE_BACK_BUFFERS * self.write_back_bytes
        bounds = sum(round_up(self.offloaded_blocks * n, PAGE) for n in self.bound_bytes)
        return {
            DEVICE: {
                "KV blocks": self.pool_bytes + bounds,
                "KV on the move": PREFETCH_SLOTS * self.slot_bytes + write_backs,
            },
            HOST: {
                "KV blocks": offloaded[HOST],
                "KV on the move": offloaded[DEVICE]
                + PREFETCH_SLOTS * self.bounce_bytes
                + write_backs,
            },
            DISK: {"KV blocks": offloaded[DISK], "KV on the move": 0},
        }

    def _whole(self, blocks: int) -> int:
        return round_up(blocks * max(self.offloaded.record_bytes), PAGE)


@dataclass(frozen=True)
class DeviceBlockPlans:
    """How many blocks of each group of layers there is room for, the first one's anywhere."""

    groups: tuple[tuple[LayerGroup, DeviceBlockPlan], ...]

    def tier_bytes(self) -> dict[str, dict[str, int]]:
        """Bytes by tier and purpose."""
        found = [plan.tier_bytes() for _, plan in self.groups]
        return {
            tier: {name: sum(one[tier][name] for one in found) for name in purposes}
            for tier, purposes in found[0].items()
        }
