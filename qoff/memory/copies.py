"""Copies between tiers of host memory, on a thread of their own."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from torch import Tensor

from .link import Link
from .timeline import Timeline
from .workers import Workers


class Copies:
    """Copies one after another, in the order of the calls; `link` slows them down in tests."""

    def __init__(self, timeline: Timeline | None = None, link: Link | None = None) -> None:
        self._workers = Workers(1, "qoff-copy")
        self._timeline = timeline
        self._link = link
        self.bytes = 0

    @property
    def alive(self) -> bool:
        """Whether the thread is there."""
        return self._workers.alive

    def submit(self, pairs: Sequence[tuple[Tensor, Tensor]], lane: str, name: str) -> Future[None]:
        """Start copying from the second of each pair to the first; neither is touched meanwhile.

        The future ends with DiskReadError when the thread is gone.
        """

        def copy() -> None:
            for dest, source in pairs:
                dest.copy_(source)

        return self.call(copy, sum(source.nbytes for _, source in pairs), lane, name)

    def call(self, move: Callable[[], None], nbytes: int, lane: str, name: str) -> Future[None]:
        """Have `move` called, which moves so many bytes."""
        job = _Job(self, move, nbytes, lane, name)
        self._workers.submit([job])
        return job.done

    def close(self) -> None:
        """Fail what waits and join the thread."""
        self._workers.close()

    def run(self, move: Callable[[], None], nbytes: int, lane: str, name: str) -> None:
        """Move in the calling thread, at the speed of the link, and note it."""
        start = time.perf_counter()
        if self._link is not None:
            self._link.pass_through(nbytes)
        move()
        self.bytes += nbytes
        if self._timeline is not None:
            self._timeline.add(lane, name, start, time.perf_counter(), nbytes)


class _Job:
    """One move and its future."""

    def __init__(
        self, copies: Copies, move: Callable[[], None], nbytes: int, lane: str, name: str
    ) -> None:
        self.done: Future[None] = Future()
        self._copies = copies
        self._what = (move, nbytes, lane, name)

    def run(self) -> None:
        try:
            self._copies.run(*self._what)
        except Exception as error:
            self.fail(error)
        else:
            self.done.set_result(None)

    def fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)
