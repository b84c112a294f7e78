"""Time, and waiting for what others do: all that moves bytes asks a clock for both."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from qoff.errors import DiskReadError, DiskWriteError

from .workers import Workers

T = TypeVar("T")
_WATCH_S = 1.0  # how often a waiting thread looks whether those it waits for still live


class Clock:
    """The system's time and threads. `virtual.VirtualClock` stands in for it."""

    def now(self) -> float:
        """Seconds since some moment."""
        return time.perf_counter()

    def wait(self, futures: Iterable[Future[Any]], timeout: float | None = None) -> None:
        """Wait until all have ended, or for so many seconds."""
        wait(list(futures), timeout=timeout)

    def result(self, future: Future[T]) -> T:
        """Wait for what comes of it. Raises what went wrong."""
        self.wait([future])
        return future.result()

    def workers(
        self, threads: int, name: str, error: type[DiskReadError | DiskWriteError] = DiskReadError
    ) -> Workers:
        """So many threads that make calls in the order of submission."""
        return Workers(threads, name, error)

    def join(self, futures: Iterable[Future[Any]], alive: Callable[[], bool], lost: str) -> None:
        """Wait until all have ended. Raises DiskReadError(lost) when the threads are gone."""
        for future in futures:
            while not future.done():
                self.wait([future], timeout=_WATCH_S)
                if not future.done() and not alive():
                    raise DiskReadError(lost)


SYSTEM = Clock()
