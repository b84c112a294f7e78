"""Sizes of packed blocks on three tiers, and of what they pass through."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qoff.kvcache.groups import LayerGroup
from qoff.memory.arena import PAGE, round_up

from .placement import DEVICE, DISK, HOST, TIERS

RING_SLOTS = 3  # two are filled while one is read
STAGE_BLOCKS = 8  # written to disk together at most
STAGES = 4


@dataclass(frozen=True)
class BlockPlan:
    """Sizes of a `TieredBlocks`.

    record_bytes: of a block in each layer, all KV heads. blocks: of each tier, as many for each of
    `sequences` sequences. ring_blocks: the most that a pass has to bring to the device. lap: blocks
    that a sequence has at once, where older ones are free; 0: it keeps all. Then its next block
    lies where the one of a lap before lay.
    attends_on_host: host blocks are attended where they are. choice_bytes: what `LateChoices` has
    of a block that is brought to the device; 0 for dense attention. bound_bytes: of each layer, the
    bounds of such a block, where the CPU chooses by them.
    """

    record_bytes: tuple[int, ...]
    blocks: dict[str, int]
    sequences: int
    ring_blocks: int
    attends_on_host: bool
    choice_bytes: int = 0
    bound_bytes: tuple[int, ...] = ()
    lap: int = 0

    @property
    def chosen(self) -> int:
        """How many blocks come when they are chosen, the first ones."""
        moved = self.blocks[DISK] + (0 if self.attends_on_host else self.blocks[HOST])
        return moved if self.choice_bytes else 0

    @property
    def stride(self) -> int:
        """Bytes from block to block on disk and in the ring."""
        return round_up(max(self.record_bytes, default=1), PAGE)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot of the ring."""
        return self.ring_blocks * self.stride

    @property
    def stage_bytes(self) -> int:
        """Bytes of memory on the way to disk."""
        return STAGES * STAGE_BLOCKS * self.stride if self.blocks[DISK] else 0

    def pool_bytes(self, tier: str) -> int:
        """Bytes of the blocks of a tier, all layers."""
        count = self.blocks[tier]
        if tier == DISK:
            return count * self.stride * len(self.record_bytes)
        return sum(round_up(count * nbytes, PAGE) for nbytes in self.record_bytes)

    def tier_bytes(self) -> dict[str, int]:
        """Bytes by tier, all purposes together; the ring is on the device."""
        return tier_bytes([self])


@dataclass(frozen=True)
class BlockPlans:
    """Sizes of the stores of a model's groups of layers, one each, which share their staging."""

    groups: tuple[tuple[LayerGroup, BlockPlan], ...] = ()

    @property
    def plans(self) -> list[BlockPlan]:
        return [plan for _, plan in self.groups]

    def tier_bytes(self) -> dict[str, int]:
        """Bytes by tier, all purposes together."""
        return tier_bytes(self.plans)


def tier_bytes(plans: Sequence[BlockPlan]) -> dict[str, int]:
    """Bytes by tier of stores that share a ring and what is on its way to disk."""
    ring = RING_SLOTS * max((plan.slot_bytes for plan in plans), default=0)
    stage = max((plan.stage_bytes for plan in plans), default=0)
    bounds = sum(
        round_up(plan.chosen * n, PAGE)
        for plan in plans
        for n in (plan.choice_bytes, *plan.bound_bytes)
    )
    pools: dict[str, int] = {tier: sum(plan.pool_bytes(tier) for plan in plans) for tier in TIERS}
    pools[DEVICE] += ring + bounds
    pools[HOST] += stage
    return pools
