"""Links of a given speed, simulated by sleeping."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

from qoff.memory.instrumentation import PLAIN, Instrumentation


class Link:
    """A path of `bytes_per_s`, shared by all who use it, on which each transfer takes `latency_s`.

    Transfers occupy the path one after the other, first come first served; latencies overlap.
    """

    def __init__(self, bytes_per_s: float, latency_s: float = 0.0) -> None:
        self.bytes_per_s = bytes_per_s
        self.latency_s = latency_s
        self._free_at = 0.0  # when what was handed in so far has passed
        self._lock = threading.Lock()

    def pass_through(self, nbytes: int) -> None:
        """Sleep as long as these bytes take, those of earlier callers first."""
        now = time.perf_counter()
        with self._lock:
            self._free_at = max(self._free_at, now) + nbytes / self.bytes_per_s
            arrival = self._free_at + self.latency_s
        time.sleep(arrival - now)

    def preadv(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        """`os.preadv` from behind this link."""
        count = os.preadv(fd, views, offset)
        self.pass_through(count)
        return count


def behind(
    disk: Link | None = None, host: Link | None = None, hooks: Instrumentation = PLAIN
) -> Instrumentation:
    """Hooks, with links to disk and between host memory and the device."""
    if disk is not None:
        hooks = replace(hooks, preadv=disk.preadv)
    return hooks if host is None else replace(hooks, on_copy=host.pass_through)
