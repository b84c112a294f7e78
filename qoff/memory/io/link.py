"""Link: a data path of a given speed, simulated by sleeping; slow links for tests and benches."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from qoff.errors import ArgumentError

from .disk import DiskReader


class Link:
    """A path of `bytes_per_s`, shared by all who use it, on which each transfer takes `latency_s`.

    Transfers occupy the path one after the other, first come first served; latencies overlap.
    Raises ArgumentError for a rate that is not positive or a negative latency.
    """

    def __init__(self, bytes_per_s: float, latency_s: float = 0.0) -> None:
        if not bytes_per_s > 0 or not latency_s >= 0:
            raise ArgumentError(
                f"a link of {bytes_per_s} bytes/s and {latency_s} s latency: "
                "wanted a positive rate and a latency of at least 0"
            )
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
        """`os.preadv` from behind this link, for `DiskReader(preadv=...)`."""
        count = os.preadv(fd, views, offset)
        self.pass_through(count)
        return count


@dataclass(frozen=True)
class Links:
    """Simulated links, for what is moved between disk, host and device."""

    disk: Link | None = None
    host: Link | None = None

    def reader(self) -> DiskReader:
        """A reader behind the disk's link."""
        return DiskReader() if self.disk is None else DiskReader(preadv=self.disk.preadv)
