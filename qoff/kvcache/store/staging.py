"""Memory that the blocks of stores which take turns pass through."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future

from torch import Tensor

from qoff.memory.arena import Arena
from qoff.memory.instrumentation import PLAIN, Instrumentation
from qoff.memory.io.copies import Copies

from .placement import DEVICE, HOST
from .plan import RING_SLOTS, STAGES, BlockPlan
from .ring import BlockRing


class Staging:
    """A ring on the device for blocks that are read, and buffers for those that are written.

    plans: of the stores. buffers: each with the write from it that is under way, the oldest first.
    """

    def __init__(
        self,
        plans: Sequence[BlockPlan],
        arenas: dict[str, Arena],
        copies: Copies,
        instrumentation: Instrumentation = PLAIN,
    ) -> None:
        slot = max((plan.slot_bytes for plan in plans), default=0)
        slots = [
            arenas[DEVICE].alloc(slot, f"KV ring slot {i}")
            for i in range(RING_SLOTS if slot else 0)
        ]
        self.ring = BlockRing(slots, lambda: copies.alive, instrumentation)
        stage = max((plan.stage_bytes for plan in plans), default=0) // STAGES
        self.buffers: deque[tuple[Tensor, Future[None]]] = deque(
            (arenas[HOST].alloc(stage, "KV blocks on their way to disk"), _done())
            for _ in range(STAGES if stage else 0)
        )


def _done() -> Future[None]:
    future: Future[None] = Future()
    future.set_result(None)
    return future
