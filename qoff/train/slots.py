"""The weights of units that lie elsewhere, read ahead into a few slots in the order of a step."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future

from torch import Tensor

from .homes import Home, Link, Read

SLOTS = 3  # one is computed with, one is read, one is written back


class WeightSlots:
    """Serves the weights of each unit: where they lie if that is here, else from a slot.

    A slot that is given back takes the next unit of the order at once, when what was written of it
    has been written. places: where each unit's weights lie now.
    """

    def __init__(self, link: Link, places: list[Home], slots: Sequence[Tensor]) -> None:
        self.wait_s = 0.0  # that `acquire` waited
        self.places = places
        self._link = link
        self._order: deque[int] = deque()
        self._free = list(slots)
        self._writes: list[Future[None]] = []
        self._loads: dict[int, tuple[Tensor, Read]] = {}
        self._changed = threading.Condition()

    def begin(self, order: Iterable[int]) -> None:
        """Read these units ahead, of those that are not here; none may be held."""
        with self._changed:
            self._order = deque(i for i in order if self.moves(i))
            self._read_ahead()

    def acquire(self, i: int) -> Tensor:
        """Wait for a unit's weights, uint8; they stay until `release`. Raises DiskReadError."""
        memory = self.here(i)
        if memory is not None:
            return memory
        start = time.perf_counter()
        with self._changed:
            while i not in self._loads:
                self._changed.wait()
            slot, read = self._loads[i]
        read.result()
        self.wait_s += time.perf_counter() - start
        return slot[: self.places[i].nbytes]

    def moves(self, i: int) -> bool:
        """Whether a unit's weights pass through slots."""
        return self.here(i) is None

    def here(self, i: int) -> Tensor | None:
        """The memory of a unit that does not."""
        return self._link.here(self.places[i])

    def release(self, i: int) -> None:
        """Give a unit back."""
        if self.moves(i):
            with self._changed:
                slot, _ = self._loads.pop(i)
                self._link.spoil(slot)
                self._free.append(slot)
                self._read_ahead()

    def write_back(self, i: int, place: Home | None = None) -> None:
        """Write a unit that was changed to a place on disk, and give it back; in any thread.

        place: None: where it came from.
        """
        if self.moves(i):
            place = self.places[i] if place is None else place
            memory = self._loads[i][0][: place.nbytes]
            self._writes.append(self._link.write(place, memory, lambda: self.release(i)))

    def settle(self) -> None:
        """Wait until all that was written back is there. Raises DiskWriteError."""
        writes, self._writes = self._writes, []
        for write in writes:
            write.result()

    def stop(self) -> None:
        """Read nothing more, and wait for what is being read: the slots are free then."""
        for write in self._writes:
            write.exception()
        self._writes.clear()
        with self._changed:
            self._order.clear()
            loads = list(self._loads.values())
            self._loads.clear()
            self._free += [slot for slot, _ in loads]
        for slot, read in loads:
            read.exception()
            self._link.spoil(slot)

    def _read_ahead(self) -> None:
        while self._free and self._order and self._order[0] not in self._loads:
            i = self._order.popleft()
            slot, place = self._free.pop(), self.places[i]
            self._loads[i] = slot, self._link.read(place, slot[: place.nbytes])
        self._changed.notify_all()
