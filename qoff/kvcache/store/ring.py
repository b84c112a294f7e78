"""A few slots that the blocks of a layer are brought to before attention reads them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait

from torch import Tensor

from qoff.errors import DiskReadError
from qoff.memory.instrumentation import Instrumentation

_WATCH_S = 1.0

Fill = Callable[[Tensor], Sequence[Future[None]]]


class Fetch:
    """What is on its way into a slot, or there."""

    def __init__(self, slot: int, memory: Tensor, futures: Sequence[Future[None]]) -> None:
        self.slot = slot
        self.memory = memory
        self.futures = futures
        self.in_use = False


class BlockRing:
    """Slots that blocks are fetched into; from one thread.

    slots: uint8 memory of each. alive: whether the threads that fill them are there. At least one
    slot is free whenever a fetch that nobody uses can be dropped.
    """

    def __init__(
        self,
        slots: Sequence[Tensor],
        alive: Callable[[], bool],
        instrumentation: Instrumentation,
    ) -> None:
        self._free = list(range(len(slots)))
        self._slots = slots
        self._alive = alive
        self._poison = instrumentation.poison
        self._ahead: list[Fetch] = []  # fetched, not in use; oldest first
        self.wait_s = 0.0  # that `use` waited
        for memory in slots:
            self._wipe(memory)

    def start(self, fill: Fill, must: bool) -> Fetch | None:
        """Start a fetch; None when no slot is free, unless it must: another one is dropped then."""
        if not self._free:
            if not must:
                return None
            if not self._ahead:
                raise RuntimeError("all slots of the KV ring are in use")
            self.drop(self._ahead[-1])
        slot = self._free[-1]
        fetch = Fetch(slot, self._slots[slot], fill(self._slots[slot]))
        self._free.pop()
        self._ahead.append(fetch)
        return fetch

    def holds(self, fetch: Fetch) -> bool:
        """Whether a fetch has not been dropped."""
        return fetch.in_use or fetch in self._ahead

    def use(self, fetch: Fetch) -> Tensor:
        """Wait until a fetch has arrived; its memory, until `drop`. Raises what went wrong."""
        self._ahead.remove(fetch)
        fetch.in_use = True
        start = time.perf_counter()
        try:
            self._settle(fetch)
        finally:
            self.wait_s += time.perf_counter() - start
        for future in fetch.futures:
            future.result()
        return fetch.memory

    def drop(self, fetch: Fetch) -> None:
        """Give the slot of a fetch back."""
        if not self.holds(fetch):
            return
        self._settle(fetch)
        if fetch in self._ahead:
            self._ahead.remove(fetch)
        fetch.in_use = False
        self._wipe(fetch.memory)
        self._free.append(fetch.slot)

    def _settle(self, fetch: Fetch) -> None:
        """Return when nothing is written to a slot any more."""
        for future in fetch.futures:
            while not future.done():
                if wait([future], timeout=_WATCH_S).not_done and not self._alive():
                    raise DiskReadError("KV cache: the threads that move blocks died")

    def _wipe(self, memory: Tensor) -> None:
        if self._poison:
            memory.fill_(0xFF)
