"""CudaTransfers: units on their way to a GPU, on a copy stream beside the computation.

From host memory a unit is one copy, enqueued at once. From disk it is read into a staging buffer in
pinned memory and then copied; each buffer has a thread, so that the next unit is read meanwhile.
All copies to the GPU are on one stream: each into a slot follows those that were started into it
before. Experts that leave for host memory go over another one, as a link carries as much both ways
at once; what comes into their places, or out of their new ones, waits for those of them alone.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial

import torch
from torch import Tensor

from qoff.errors import ArgumentError
from qoff.memory.arena import Arena
from qoff.memory.instrumentation import PLAIN, Instrumentation
from qoff.memory.plan import FileRange, Image, Residency

from .copy_stream import Copy, CopyStream, Event
from .disk import DiskReader
from .transfers import Mark, Transfers, UnitRead


class CudaTransfers(Transfers):
    """Transfers to a GPU, for weights in the packing that they have in their files.

    Codes that are widened are so on the GPU, on the copy stream, or in host memory once.

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
        super().__init__(torch.device(device), reader)
        self.host_staging = host_staging
        self._stagers = self.clock.workers(host_staging, "qoff-staging")
        self._watchers = self.clock.workers(1, "qoff-timeline")
        self._leaving_watchers = self.clock.workers(1, "qoff-timeline")
        self._threads += [self._stagers, self._watchers, self._leaving_watchers]
        # Staging buffers, each with the copy that must have ended before it is read into.
        self._buffers: queue.SimpleQueue[tuple[Tensor, Event | None]] = queue.SimpleQueue()
        self._last: Future[Event] | None = None  # the piece that was asked for last
        self._make_stream = stream
        self._leaving: CopyStream | None = None  # to host memory, once something does
        # By the addresses of slots: the copies that ended up there, or left from there.
        self._saved: dict[int, Event] = {}  # of host memory
        self._left: dict[int, Event] = {}  # of the device, until something else comes
        self._taken: dict[int, Future[Event]] = {}  # of host memory

    def open(
        self, residency: Residency, instrumentation: Instrumentation = PLAIN
    ) -> Mapping[str, Arena]:
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
        self._stream = self._make_stream(self.device)
        self.device = self._stream.device
        arenas = super().open(residency, instrumentation)
        self.buffer_bytes = residency.host_staging_bytes // self.host_staging
        for i in range(self.host_staging):
            memory = arenas["host"].alloc(self.buffer_bytes, f"staging buffer {i}")
            self._buffers.put((memory, None))
        return arenas

    def read_unit(self, image: Image, memory: Tensor, verify: bool, after: Mark) -> UnitRead:
        read = UnitRead(self, image, memory, verify)
        self._follow(self._left.pop(memory.data_ptr(), None))
        for at in range(0, image.nbytes, self.buffer_bytes):
            stop = min(at + self.buffer_bytes, image.nbytes)
            piece = partial(self._bring, read, at, stop, after, self._last)
            self._last = self._stagers.submit(piece)
            read.futures.append(self._last)
        return read

    def copy_unit(self, image: Image, source: Tensor, memory: Tensor, after: Mark) -> UnitRead:
        read = UnitRead(self, image, memory)
        self._follow(self._left.pop(memory.data_ptr(), None))
        self._follow(self._saved.get(source.data_ptr()))
        if self.stream.pageable:  # which takes as long as the copy
            copying = self._stagers.submit(partial(self._copy, read, source, after))
        else:
            copying = Future[Event]()  # later copies to the memory are behind it
            copying.set_result(self._copy(read, source, after))
        if source.data_ptr() in self._saved:
            self._taken[source.data_ptr()] = copying
        read.futures.append(copying)
        return read

    def save(self, memory: Tensor, host: Tensor) -> None:
        used = self.stream.recycle(memory, poison=False)
        if self._leaving is None:
            self._leaving = self._make_stream(self.device)
        taken = self._taken.pop(host.data_ptr(), None)
        if taken is not None:
            self.clock.wait([taken])
            if taken.exception() is None:  # else nothing was read from there
                self._leaving.follow(taken.result())
        self._instrumentation.on_copy(memory.nbytes)
        timed = self._instrumentation.timeline is not None
        copy = self._leaving.copy(memory, host, used, timed)
        self._saved[host.data_ptr()] = self._left[memory.data_ptr()] = copy.ended
        if timed:
            watch = partial(self._watch, copy, "device to host", "expert", memory.nbytes)
            self._leaving_watchers.submit(watch)
        if self._instrumentation.poison:  # which is on the current stream
            self.stream.order_after(copy.ended)

    def recycle(self, memory: Tensor) -> Mark:
        return self.stream.recycle(memory, self._instrumentation.poison)

    def close(self) -> None:
        super().close()
        if self._leaving is not None:
            self._leaving.close()
        self._stream = self._leaving = None

    def _follow(self, event: Event | None) -> None:
        """Have what comes to the device next wait for a copy from there."""
        if event is not None:
            self.stream.follow(event)

    def _bring(
        self, read: UnitRead, at: int, stop: int, after: Mark, before: Future[Event] | None
    ) -> Event:
        """Bring the bytes at..stop of an image to the GPU, behind `before`, in a stager."""
        read.check()
        buffer, copied = self._buffers.get()  # there is one for each thread
        try:
            if copied is not None:
                copied.synchronize()
            piece = buffer[: stop - at]
            whole = stop - at == read.image.nbytes
            ranges = read.image.ranges if whole else clip(read.image.ranges, at, stop)
            self.clock.result(self._start(read, ranges, piece, "disk to device"))
            if before is not None:
                self.clock.wait([before])
            read.check()
            if read.digest is not None:
                read.digest.update(at, piece)
            copied = self.stream.copy(piece, read.memory[at:stop], after, timed=False).ended
            if read.image.widened and stop == read.image.nbytes:
                copied = self.stream.run(partial(read.image.widen, read.memory))
            return copied
        finally:
            self._buffers.put((buffer, copied))

    def _copy(self, read: UnitRead, source: Tensor, after: Mark) -> Event:
        """Enqueue the copy of an image from host memory."""
        read.check()
        timed = self._instrumentation.timeline is not None
        copy = self.stream.copy(source, read.memory, after, timed)
        self.copied_bytes += source.nbytes
        if timed:
            label, nbytes = read.image.label, source.nbytes
            self._watchers.submit(partial(self._watch, copy, "host to device", label, nbytes))
        return copy.ended

    def _watch(self, copy: Copy, lane: str, label: str, nbytes: int) -> None:
        """Note a copy in the timeline when it has ended."""
        timeline = self._instrumentation.timeline
        assert copy.started is not None
        assert timeline is not None
        copy.started.synchronize()
        start = self.clock.now()
        copy.ended.synchronize()
        timeline.arrived(lane, label, start, nbytes)


def clip(ranges: Sequence[FileRange], at: int, stop: int) -> list[FileRange]:
    """The parts of `ranges` in the bytes at..stop of their image, in an image that starts there."""
    parts = []
    for r in ranges:
        first, end = max(r.at, at), min(r.at + r.nbytes, stop)
        if first < end:
            parts.append(FileRange(r.offset + first - r.at, end - first, first - at))
    return parts
