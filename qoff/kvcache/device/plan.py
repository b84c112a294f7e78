"""Sizes of the packed blocks of a GPU and of what they pass through on either side of the link."""

from __future__ import annotations

from dataclasses import dataclass

from qoff.kvcache.store.placement import DEVICE, DISK, HOST
from qoff.kvcache.store.tiered import BlockPlan
from qoff.memory.arena import PAGE, round_up

from .write_back import PLACES

STAGE_SLOTS = 2  # one is filled while another is attended to


@dataclass(frozen=True)
class DeviceBlockPlan:
    """How many blocks there is room for.

    near: on the device. far: those in host memory and on disk, with nothing on the device; its
    ring is in host memory. staged: far blocks of a pass that can be moved to the device together,
    `staged_from_disk` of them from disk. parcel: most new far blocks of a pass.
    """

    near: int
    far: BlockPlan
    staged: int = 0
    staged_from_disk: int = 0
    parcel: int = 0

    @property
    def pool_bytes(self) -> int:
        """Bytes of the blocks on the device, all layers."""
        return sum(round_up(self.near * nbytes, PAGE) for nbytes in self.far.record_bytes)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot of the stage, with one block more: each layer's begin where they fit."""
        return self._whole(self.staged + 1) if self.staged else 0

    @property
    def bounce_bytes(self) -> int:
        """Bytes of host memory that a slot's blocks from disk pass through."""
        return self.staged_from_disk * self.far.stride

    @property
    def parcel_bytes(self) -> int:
        """Bytes of a place of the outbox, on either side."""
        return self._whole(self.parcel)

    def tier_bytes(self) -> dict[str, dict[str, int]]:
        """Bytes by tier and purpose."""
        far, parcels = self.far.tier_bytes(), PLACES * self.parcel_bytes
        return {
            DEVICE: {
                "KV blocks": self.pool_bytes,
                "KV on the move": STAGE_SLOTS * self.slot_bytes + parcels,
            },
            HOST: {
                "KV blocks": far[HOST],
                "KV on the move": far[DEVICE] + STAGE_SLOTS * self.bounce_bytes + parcels,
            },
            DISK: {"KV blocks": far[DISK], "KV on the move": 0},
        }

    def _whole(self, blocks: int) -> int:
        return round_up(blocks * max(self.far.record_bytes), PAGE)
