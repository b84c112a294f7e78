"""Copies between tiers, on a thread of their own, on a GPU on a stream of their own, too."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from qoff.memory.instrumentation import PLAIN, Instrumentation

from .runs import Run

if TYPE_CHECKING:
    from qoff.kernels.cpu.jit.copies import CopiedWords


class Copies:
    """Copies one after another, in the order of the calls; their thread waits for nothing else.

    device: where one side of them may be. On a GPU each copy is behind the work that is on the
    caller's current stream, beside what comes there later, and ended when its future is done.
    Futures end with DiskReadError when the thread is gone.
    """

    def __init__(
        self, device: torch.device | None = None, instrumentation: Instrumentation = PLAIN
    ) -> None:
        self.clock = instrumentation.clock
        self._workers = self.clock.workers(1, "qoff-copy")
        self._instrumentation = instrumentation
        on_gpu = device is not None and device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_gpu else None
        self._bytes, self._busy_s = 0, 0.0
        self._by_jobs: CopiedWords | None = None

    @property
    def alive(self) -> bool:
        """Whether the thread is there."""
        return self._workers.alive

    @property
    def bytes(self) -> int:
        """That were copied so far."""
        return self._bytes + (0 if self._by_jobs is None else self._by_jobs.nbytes)

    @property
    def busy_s(self) -> float:
        """Seconds of the thread that copied, and of each that did in a job."""
        return self._busy_s + (0.0 if self._by_jobs is None else self._by_jobs.ns * 1e-9)

    @property
    def unwatched(self) -> bool:
        """Whether jobs of a CPU may copy instead (`job`), as nobody watches what is copied."""
        return self._stream is None and not self._instrumentation.watches_copies

    def job(self, dest: Tensor, source: Tensor, table: Tensor | None = None) -> None:
        """Copy rows by a job of the CPU's pool, here and now; see `copy_rows`."""
        from qoff.kernels.cpu.jit.copies import CopiedWords, copy_rows  # compiled when imported

        self._by_jobs = self._by_jobs or CopiedWords()
        copy_rows(dest, source, self._by_jobs, table)

    def submit(self, pairs: Sequence[tuple[Tensor, Tensor]], lane: str, name: str) -> Future[None]:
        """Start copying from the second of each pair to the first; neither is touched meanwhile."""
        nbytes = sum(source.nbytes for _, source in pairs)
        return self.call(partial(self.copy, pairs), nbytes, lane, name)

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Copy from the second of each pair to the first, in a `move` of `call`, as its last."""
        for dest, source in pairs:
            if self._stream is not None:
                dest.copy_(source, non_blocking=True)
            else:
                np.copyto(dest.numpy(), source.numpy())  # without torch's threads

    def copy_runs(self, runs: Sequence[Run], dest: Tensor, source: Tensor) -> None:
        """Copy many short runs between host memories, uint8, in a `move` of `call`."""
        to, origin = dest.numpy(), source.numpy()
        for run in runs:
            to[run.dest : run.dest + run.nbytes] = origin[run.source : run.source + run.nbytes]

    def put(self, dest: Tensor, source: Tensor) -> None:
        """Copy in a `move` of `call`; it is there on return."""
        dest.copy_(source)

    def call(
        self,
        move: Callable[[], None],
        nbytes: int,
        lane: str,
        name: str,
        reads: Sequence[Future[None]] = (),
    ) -> Future[None]:
        """Have `move` called, which moves so many bytes.

        reads: from disk, of what it moves; its turn comes when they have ended.
        """
        after = None
        if self._stream is not None:
            after = torch.cuda.current_stream(self._stream.device).record_event()
        run = partial(self._run, move, nbytes, lane, name, after)
        return self._workers.submit(run, after=reads)

    def close(self) -> None:
        """Fail what waits and join the thread."""
        self._workers.close()

    def _run(
        self,
        move: Callable[[], None],
        nbytes: int,
        lane: str,
        name: str,
        after: torch.cuda.Event | None,
    ) -> None:
        start = self.clock.now()
        with self._instrumentation.span(lane, name, nbytes):
            self._instrumentation.on_copy(nbytes)
            if self._stream is None or after is None:
                move()
            else:
                self._stream.wait_event(after)
                try:
                    with torch.cuda.stream(self._stream):
                        move()
                finally:  # nothing is written to memory any more whose move has failed
                    self._stream.synchronize()
        self._bytes += nbytes
        self._busy_s += self.clock.now() - start
