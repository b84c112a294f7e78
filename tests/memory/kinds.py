"""Every kind of transfers, for tests that all of them pass."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from qoff.memory import DiskReader, Transfers
from qoff.memory.arena import map_pages
from qoff.memory.io.copy_stream import Copy, CopyStream, Event
from qoff.memory.io.cuda_transfers import CudaTransfers
from qoff.memory.io.thread_transfers import ThreadTransfers
from qoff.memory.io.workers import Workers

KINDS = ["threads", "simulated", pytest.param("cuda", marks=pytest.mark.gpu)]
STAGING = {"threads": 0, "simulated": 2, "cuda": 2}
DELAYS = random.Random(6)


class Done:
    """An event of the simulated stream."""

    def __init__(self) -> None:
        self.happened = threading.Event()

    def synchronize(self) -> None:
        assert self.happened.wait(20)


class SimulatedStream(CopyStream):
    """Copies by a thread that takes its time; memory of the device is memory of the host."""

    def __init__(self, device: torch.device) -> None:
        self.device = torch.device("cpu")
        self.pinned: list[int] = []
        self.copies = 0
        self._copier = Workers(1, "qoff-simulated")

    def allocate(self, nbytes: int) -> Tensor:
        return map_pages(nbytes)

    def pin(self, memory: Tensor) -> None:
        self.pinned.append(memory.data_ptr())

    def unpin(self, memory: Tensor) -> None:
        self.pinned.remove(memory.data_ptr())

    def copy(self, source: Tensor, memory: Tensor, after: Event | None, timed: bool) -> Copy:
        assert source.shape == memory.shape
        job = _Job(source, memory, after)
        self.copies += 1
        self._copier.submit(job.run)
        return Copy(job.ended, job.started if timed else None)

    def run(self, work: Callable[[], None]) -> Event:
        ended = Done()
        self._copier.submit(work)
        self._copier.submit(ended.happened.set)
        return ended

    def recycle(self, memory: Tensor, poison: bool) -> Event:
        if poison:
            memory.fill_(0xFF)
        now = Done()
        now.happened.set()
        return now

    def order_after(self, event: Event) -> None:
        event.synchronize()

    def close(self) -> None:
        last = _Job(torch.empty(0), torch.empty(0), None)
        self._copier.submit(last.run)
        last.ended.synchronize()
        self._copier.close()


class _Job:
    def __init__(self, source: Tensor, memory: Tensor, after: Event | None) -> None:
        self.started, self.ended = Done(), Done()
        self._source, self._memory, self._after = source, memory, after

    def run(self) -> None:
        if self._after is not None:
            self._after.synchronize()
        self.started.happened.set()
        time.sleep(DELAYS.random() * 5e-4)
        self._memory.copy_(self._source)
        self.ended.happened.set()


def make(kind: str, reader: DiskReader | None = None) -> Transfers:
    """Transfers of a kind."""
    if kind == "threads":
        return ThreadTransfers(reader)
    if kind == "simulated":
        return CudaTransfers("cpu", reader, stream=SimulatedStream)
    return CudaTransfers("cuda", reader)
