"""CudaTransfers: units on their way to a GPU, on a copy stream beside the computation.

From host memory a unit is one copy, enqueued at once. From disk it is read into a staging buffer in
pinned memory and then copied; two threads do so, one that starts reads as soon as a buffer is free,
one that enqueues the copy when a read is complete, so that the next unit is read meanwhile. All
copies are on one stream: each into a slot follows those that were started into it before.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from qoff.errors import ArgumentError, DiskReadError
from qoff.memory.arena import Arena, map_pages
from qoff.memory.instrumentation import PLAIN, Instrumentation
from qoff.memory.plan import FileRange, Image, Residency

from .copy_stream import Copy, CopyStream, Event
from .disk import DiskReader, ReadRequest
from .lane import DISK_TO_DEVICE, HOST_TO_DEVICE, Lane
from .staged_read import Buffer, Send, StagedRead
from .thread_transfers import ThreadTransfers
from .transfers import Arenas, Mark, UnitRead
from .workers import Workers

_WATCH_S = 1.0  # how often a thread that waits for a buffer looks whether it is to stop


class CudaTransfers:
    """Transfers to a GPU, for weights in the packing that they have in their files.

    `wait` and `recycle` order the copies before and after what is on the current stream of the
    thread that calls them. `host_staging`: number of staging buffers, at least 2; a residency must
    have been planned with as many. `stream` replaces the CUDA stream in tests. Raises ArgumentError
    for fewer than two buffers.
    """

    def __init__(
        self,
        device: torch.device | str = "cuda",
        reader: DiskReader | None = None,
        host_staging: int = 2,
        stream: Callable[[torch.device], CopyStream] = CopyStream,
    ) -> None:
        if host_staging < 2:
            raise ArgumentError(
                f"{host_staging} staging buffers are too few: one is read into while another is "
                "copied"
            )
        self.host_staging = host_staging
        self.device = torch.device(device)
        self.copied_bytes = 0
        self._reader = reader if reader is not None else DiskReader()
        self._loader = ThreadTransfers(self._reader)  # from disk to host memory
        self._fillers = Workers(1, "qoff-staging")
        self._senders = Workers(1, "qoff-copy-queue")
        self._watchers: Workers | None = None  # for the timeline
        self._buffers: queue.SimpleQueue[Buffer | None] = queue.SimpleQueue()  # None: closed
        self._buffer_bytes = 0
        self._make_stream = stream
        self._stream: CopyStream | None = None
        self._pinned: Tensor | None = None
        self._reads = Lane(None, DISK_TO_DEVICE)
        self._copies = Lane(None, HOST_TO_DEVICE)
        self._poison = False
        self._closed = False

    @property
    def reader(self) -> DiskReader:
        return self._reader

    @property
    def alive(self) -> bool:
        """Whether all threads are there."""
        return self._reader.alive and self._fillers.alive and self._senders.alive

    def open(self, residency: Residency, instrumentation: Instrumentation = PLAIN) -> Arenas:
        self._check(residency)
        self._stream = self._make_stream(self.device)
        self.device = self._stream.device
        device = Arena("device", residency.device_bytes, self._stream.allocate)
        host = Arena("host", residency.host_bytes, self._host_memory)
        self._buffer_bytes = residency.host_staging_bytes // self.host_staging
        for i in range(self.host_staging):
            self._buffers.put(Buffer(host.alloc(self._buffer_bytes, f"staging buffer {i}")))
        timeline, self._poison = instrumentation.timeline, instrumentation.poison
        self._loader.watch(instrumentation)
        self._reads = Lane(timeline, DISK_TO_DEVICE)
        self._copies = Lane(timeline, HOST_TO_DEVICE)
        if timeline is not None:
            self._watchers = Workers(1, "qoff-timeline")
        return Arenas(device, host)

    def read_unit(self, image: Image, memory: Tensor, verify: bool, after: Mark | None) -> UnitRead:
        read = StagedRead(self, image, memory, verify and image.data_at is not None, after)
        self._fillers.submit(read.pieces(self._buffer_bytes))
        return read

    def load_host(self, image: Image, memory: Tensor, verify: bool) -> UnitRead:
        return self._loader.load_host(image, memory, verify)

    def copy_unit(
        self, image: Image, source: Tensor, memory: Tensor, after: Mark | None
    ) -> UnitRead:
        copy = self.stream.copy(source, memory, cast("Event | None", after), self._timed)
        self.copied_bytes += source.nbytes
        if copy.started is not None and self._watchers is not None:
            self._watchers.submit([_Watch(self._copies, image.label, source.nbytes, copy)])
        return _CudaCopy(self.stream, copy.ended)

    def recycle(self, memory: Tensor) -> Mark:
        return self.stream.recycle(memory, self._poison)

    def close(self) -> None:
        self._closed = True
        self._buffers.put(None)
        self._loader.close()  # and the reader, which ends what the others wait for
        self._fillers.close()
        self._senders.close()
        if self._watchers is not None:
            self._watchers.close()
        stream, self._stream = self._stream, None
        if stream is None:
            return
        stream.close()  # before memory that is copied or computed on is given up
        if self._pinned is not None:
            stream.unpin(self._pinned)
            self._pinned = None

    @property
    def stream(self) -> CopyStream:
        """The stream. Raises DiskReadError when it is not open."""
        if self._stream is None:
            raise DiskReadError("the transfers are closed")
        return self._stream

    @property
    def _timed(self) -> bool:
        return self._watchers is not None

    def take_buffer(self, image: Image) -> Buffer:
        while not self._closed and self._senders.alive:
            try:
                buffer = self._buffers.get(timeout=_WATCH_S)
            except queue.Empty:
                continue
            if buffer is None:
                break
            if buffer.copied is not None:
                buffer.copied.synchronize()
                buffer.copied = None
            return buffer
        raise DiskReadError(f"{image.file.path}: closed before the read was done")

    def give_buffer(self, buffer: Buffer) -> None:
        self._buffers.put(buffer)

    def start_reads(
        self, image: Image, ranges: Sequence[FileRange], memory: Tensor
    ) -> list[ReadRequest]:
        path = image.file.path
        reads = [
            self._reader.submit(path, r.offset, memory[r.at : r.at + r.nbytes]) for r in ranges
        ]
        self._reads.note(reads, image.label, sum(r.nbytes for r in ranges))
        return reads

    def send(self, job: Send) -> None:
        self._senders.submit([job])

    def _check(self, residency: Residency) -> None:
        if residency.staging_bytes:
            raise ArgumentError(
                f"weights would have to be repacked to {residency.packing} on their way to the "
                "GPU; convert the model without --for cpu"
            )
        if residency.host_staging != self.host_staging:
            raise ArgumentError(
                f"the residency has {residency.host_staging} staging buffers, these transfers use "
                f"{self.host_staging}; plan it with host_staging={self.host_staging}"
            )

    def _host_memory(self, nbytes: int) -> Tensor:
        memory = map_pages(nbytes)
        if nbytes:
            self.stream.pin(memory)
            self._pinned = memory
        return memory


class _CudaCopy:
    """One unit on its way from host memory: its copy is on the stream."""

    def __init__(self, stream: CopyStream, copied: Event) -> None:
        self._stream = stream
        self._copied = copied

    def wait(self) -> None:
        self._stream.order_after(self._copied)

    def finish(self) -> None:
        self._copied.synchronize()

    def abandon(self) -> None:
        """What is on the stream cannot be taken back."""

    def settle(self) -> None:
        """Later copies to the same memory are behind this one on the stream."""


@dataclass(frozen=True, eq=False)
class _Watch:
    """A job: note a copy in the timeline when it has ended."""

    lane: Lane
    label: str
    nbytes: int
    copy: Copy

    def run(self) -> None:
        assert self.copy.started is not None
        self.copy.started.synchronize()
        start = time.perf_counter()
        self.copy.ended.synchronize()
        self.lane.add(self.label, start, self.nbytes)

    def fail(self, error: Exception) -> None:
        """The copy goes unnoted."""
