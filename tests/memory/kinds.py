"""Every kind of transfers, for tests that all of them pass."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from qoff.checkpoint import Checkpoint
from qoff.memory import (
    HEAD,
    DiskReader,
    Residency,
    Transfers,
    Unit,
    WeightStore,
    place_in_host,
    residency_of,
)
from qoff.memory.arena import map_pages
from qoff.memory.instrumentation import Instrumentation
from qoff.memory.io.copy_stream import Copy, CopyStream, Event
from qoff.memory.io.cuda_transfers import CudaTransfers
from qoff.memory.io.thread_transfers import ThreadTransfers
from qoff.memory.io.workers import Workers
from tests.instruments import POISON

KINDS = ["threads", "simulated", pytest.param("cuda", marks=pytest.mark.gpu)]
STAGING = {"threads": 0, "simulated": 2, "cuda": 2}
DELAYS = random.Random(6)
LAYERS = 4
UNITS: list[Unit] = [*range(LAYERS), HEAD]
PACKING = "split32"


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

    def follow(self, event: Event) -> None:
        self._copier.submit(event.synchronize)

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


def racing(fd: int, views: Sequence[memoryview], offset: int) -> int:
    """Reads that take any time and so end in any order."""
    time.sleep(DELAYS.random() * 3e-4)
    return os.preadv(fd, views, offset)


def racing_transfers(kind: str = "threads") -> Transfers:
    """Transfers of a kind whose reads end in any order."""
    return make(kind, DiskReader(threads=4, chunk=4096, preadv=racing))


def make(kind: str, reader: DiskReader | None = None) -> Transfers:
    """Transfers of a kind."""
    if kind == "threads":
        return ThreadTransfers(reader)
    if kind == "simulated":
        return CudaTransfers("cpu", reader, stream=SimulatedStream)
    return CudaTransfers("cuda", reader)


def plan_for(
    kind: str,
    checkpoint: Checkpoint,
    resident: Sequence[str] = (),
    slots: int = 2,
    tile_bytes: int | None = None,
    sources: int = 0,
) -> Residency:
    """A residency, with up to so many bytes of sources in host memory."""
    plan = residency_of(checkpoint, resident, slots, packing=PACKING, tile_bytes=tile_bytes)
    buffers = place_in_host(checkpoint, plan, None, STAGING[kind]).host_bytes
    return place_in_host(checkpoint, plan, buffers + sources, STAGING[kind])


def opened(
    kind: str,
    checkpoint: Checkpoint,
    plan: Residency,
    instrumentation: Instrumentation = POISON,
    **options: object,
) -> WeightStore:
    return WeightStore(
        checkpoint,
        plan,
        transfers=racing_transfers(kind),
        instrumentation=instrumentation,
        **options,  # type: ignore[arg-type]
    )
