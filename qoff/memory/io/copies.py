"""Copies between tiers, on a thread of their own, on a GPU on a stream of their own, too."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from qoff.memory.instrumentation import PLAIN, Instrumentation

from .workers import Workers


class Copies:
    """Copies one after another, in the order of the calls.

    device: where one side of them may be. On a GPU each copy is behind the work that is on the
    caller's current stream, beside what comes there later, and ended when its future is done.
    """

    def __init__(
        self, device: torch.device | None = None, instrumentation: Instrumentation = PLAIN
    ) -> None:
        self._workers = Workers(1, "qoff-copy")
        self._timeline, self._link = instrumentation.timeline, instrumentation.links.host
        on_gpu = device is not None and device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_gpu else None
        self.bytes = 0

    @property
    def alive(self) -> bool:
        """Whether the thread is there."""
        return self._workers.alive

    def submit(self, pairs: Sequence[tuple[Tensor, Tensor]], lane: str, name: str) -> Future[None]:
        """Start copying from the second of each pair to the first; neither is touched meanwhile.

        The future ends with DiskReadError when the thread is gone.
        """

        nbytes = sum(source.nbytes for _, source in pairs)
        return self.call(lambda: self.copy(pairs), nbytes, lane, name)

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Copy from the second of each pair to the first, in a `move` of `call`, as its last."""
        for dest, source in pairs:
            if self._stream is not None:
                dest.copy_(source, non_blocking=True)
            else:
                np.copyto(dest.numpy(), source.numpy())  # without torch's threads

    def call(self, move: Callable[[], None], nbytes: int, lane: str, name: str) -> Future[None]:
        """Have `move` called, which moves so many bytes."""
        after = None
        if self._stream is not None:
            after = torch.cuda.current_stream(self._stream.device).record_event()
        job = _Job(self, move, nbytes, lane, name, after)
        self._workers.submit([job])
        return job.done

    def close(self) -> None:
        """Fail what waits and join the thread."""
        self._workers.close()

    def run(
        self,
        move: Callable[[], None],
        nbytes: int,
        lane: str,
        name: str,
        after: torch.cuda.Event | None,
    ) -> None:
        """Move in the calling thread, at the speed of the link, and note it."""
        start = time.perf_counter()
        if self._link is not None:
            self._link.pass_through(nbytes)
        with self._on_stream(after):
            move()
        self.bytes += nbytes
        if self._timeline is not None:
            self._timeline.add(lane, name, start, time.perf_counter(), nbytes)

    @contextmanager
    def _on_stream(self, after: torch.cuda.Event | None) -> Iterator[None]:
        """Have copies on the stream, behind `after`, and wait for them."""
        if self._stream is None or after is None:
            yield
            return
        self._stream.wait_event(after)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:  # nothing is written to memory any more whose move has failed
            self._stream.synchronize()


class _Job:
    """One move and its future."""

    def __init__(
        self,
        copies: Copies,
        move: Callable[[], None],
        nbytes: int,
        lane: str,
        name: str,
        after: torch.cuda.Event | None,
    ) -> None:
        self.done: Future[None] = Future()
        self._copies = copies
        self._what = (move, nbytes, lane, name, after)

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
