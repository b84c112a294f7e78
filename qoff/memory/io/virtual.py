"""Virtual time: the threads that move bytes are greenlets of one, and only waiting takes time.

So what a schedule, a ring or a prefetcher would wait for on another machine is found by running
them, without that machine, and always the same.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import count
from typing import Any, TypeVar

from greenlet import getcurrent, greenlet

from qoff.errors import DiskReadError, DiskWriteError

from .clock import Clock
from .workers import Workers, when_all

T = TypeVar("T")


class VirtualClock(Clock):
    """Owns what time it is: that of the next event, when everybody waits. For one thread."""

    def __init__(self) -> None:
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = count()  # events of one time come in the order in which they were made
        self._loop = getcurrent()  # who takes the events at present
        self._inside: set[greenlet] = set()  # greenlets that stand for threads

    def now(self) -> float:
        return self._now

    def at(self, when: float, call: Callable[[], object]) -> None:
        """Have something called at a time, now at the earliest."""
        heapq.heappush(self._events, (max(when, self._now), next(self._numbers), call))

    def sleep_until(self, when: float) -> None:
        """Let others go on until then."""
        me = getcurrent()
        if me in self._inside:
            self.at(when, me.switch)
            self._loop.switch()
            return
        end = max(when, self._now), next(self._numbers)
        while self._events and self._events[0][:2] < end:
            self._next(me)
        self._now = end[0]

    def wait(self, futures: Iterable[Future[Any]], timeout: float | None = None) -> None:
        """Let others go on until all have ended, whatever `timeout` is.

        Raises RuntimeError where nothing is left that could end them.
        """
        left = [future for future in futures if not future.done()]
        me = getcurrent()
        if me in self._inside:
            if left:
                when_all(left, lambda _: self.at(self._now, me.switch))
                self._loop.switch()
            return
        while not all(future.done() for future in left):
            if not self._events:
                raise RuntimeError("nothing is under way that could end what is waited for")
            self._next(me)

    def _next(self, loop: greenlet) -> None:
        """Have the next event happen."""
        self._now, _, call = heapq.heappop(self._events)
        self._loop = loop
        call()

    def workers(
        self, threads: int, name: str, error: type[DiskReadError | DiskWriteError] = DiskReadError
    ) -> Workers:
        return VirtualWorkers(self, threads, name, error)

    def spawn(self, call: Callable[[], object]) -> None:
        """Have something called that may wait, as by a thread of its own."""

        def run() -> None:
            me = getcurrent()
            try:
                call()
            finally:
                self._inside.discard(me)
                me.parent = self._loop  # which is gone on with

        def begin() -> None:
            one = greenlet(run)
            self._inside.add(one)
            one.switch()

        self.at(self._now, begin)


class VirtualWorkers(Workers):
    """Calls that are made as so many threads would make them."""

    def __init__(
        self,
        clock: VirtualClock,
        threads: int,
        name: str,
        error: type[DiskReadError | DiskWriteError],
    ) -> None:
        self._clock, self._free, self._name, self._error = clock, threads, name, error
        self._calls = deque()
        self._running: set[Future[Any]] = set()
        self._refusal: Exception | None = None

    @property
    def alive(self) -> bool:
        return True

    def submit(
        self, call: Callable[[], T], urgent: bool = False, after: Sequence[Future[Any]] = ()
    ) -> Future[T]:
        future: Future[T] = Future()

        def queue(error: BaseException | None) -> None:
            error = error or self._refusal
            if error is not None:
                future.set_exception(error)
                return
            (self._calls.appendleft if urgent else self._calls.append)((call, future))
            self._start()

        when_all(after, queue)
        return future

    def close(self) -> None:
        self._refusal = self._error(f"{self._name}: closed before it was done")
        while self._calls:
            self._calls.popleft()[1].set_exception(self._refusal)
        self._clock.wait(self._running)

    def _start(self) -> None:
        while self._calls and self._free:
            self._free -= 1
            call, future = self._calls.popleft()
            self._running.add(future)
            self._clock.spawn(partial(self._make, call, future))

    def _make(self, call: Callable[[], Any], future: Future[Any]) -> None:
        try:
            found, error = call(), None
        except Exception as failed:
            found, error = None, failed
        self._free += 1
        self._running.discard(future)
        self._start()
        if error is None:
            future.set_result(found)
        else:
            future.set_exception(error)
