"""Lane: the units that travel over one link, as intervals of a timeline."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future

from .timeline import Timeline

DISK_TO_DEVICE = "disk to device"
DISK_TO_HOST = "disk to host"
HOST_TO_DEVICE = "host to device"


class Lane:
    """One lane of a timeline; None for a timeline notes nothing.

    Units travel in the order in which they are asked for, several of them queued: one starts when
    it was asked for, or when the unit before it has arrived.
    """

    def __init__(self, timeline: Timeline | None, name: str) -> None:
        self._timeline = timeline
        self._name = name
        self._arrived = 0.0  # when the unit before did
        self._lock = threading.Lock()

    def note(self, futures: Sequence[Future[None]], label: str, nbytes: int) -> None:
        """Note an interval when all of `futures` have ended; none if one of them fails."""
        if self._timeline is None or not futures:
            return
        asked, left = time.perf_counter(), len(futures)

        def ended(_: Future[None]) -> None:
            nonlocal left
            with self._lock:
                left -= 1
                if left:
                    return
            if all(f.exception() is None for f in futures):
                self.add(label, asked, nbytes)

        for future in futures:
            future.add_done_callback(ended)

    def add(self, label: str, asked: float, nbytes: int, arrived: float | None = None) -> None:
        """Note that a unit has arrived, now unless said otherwise."""
        if self._timeline is None:
            return
        stop = time.perf_counter() if arrived is None else arrived
        with self._lock:
            start = min(max(asked, self._arrived), stop)
            self._arrived = max(self._arrived, stop)
        self._timeline.add(self._name, label, start, stop, nbytes)
