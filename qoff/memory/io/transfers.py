"""Transfers: the one interface to asynchrony.

The weight store says what shall lie where and waits for it; how the bytes travel to the device is
decided by the implementations: `thread_transfers` with host threads, `cuda_transfers` with streams
and events. Both read files into host memory in the same way.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from qoff.checkpoint import FileCheck, TensorEntry, WeightFile, read_weight
from qoff.errors import DiskReadError
from qoff.kernels.layout.qtensor import QTensor, repack_into
from qoff.memory.arena import Arena, TierArenas
from qoff.memory.instrumentation import PLAIN, Instrumentation
from qoff.memory.plan import FileRange, Image, Residency, view

from .copies import Copies
from .copy_stream import CopyStream, Event
from .disk import DiskReader, ReadRequest
from .workers import Workers

Mark: TypeAlias = Event | None  # a point in the order of computations, made by `recycle`


class FileDigest:
    """The check of a file whose whole data section passes by in a raw image, piece by piece."""

    def __init__(self, reader: DiskReader, image: Image) -> None:
        assert image.data_at is not None
        self._reader, self._file = reader, image.file
        self._start = image.data_at
        self._stop = image.data_at + image.file.nbytes - image.file.data_start
        self._check = FileCheck(image.file)

    def update(self, at: int, piece: Tensor) -> None:
        """Add the bytes of the raw image that start at `at`, where the last ones ended.

        Reads the header from the file first. Raises DiskReadError, and with the last bytes
        ChecksumError when this is not the file's checksum, FormatError for NaN and infinity.
        """
        if at == 0:
            header = torch.empty(self._file.data_start, dtype=torch.uint8)
            request = self._reader.submit(self._file.path, 0, header, urgent=True)
            self._reader.clock.result(request)
            self._check.update(header.numpy())
        first, stop = max(self._start - at, 0), min(self._stop - at, len(piece))
        if first < stop:
            self._check.update(piece[first:stop].numpy())
        if at < self._stop <= at + len(piece):
            self._check.finish()


class UnitRead:
    """An image on its way to `memory`.

    futures: of all that moves it; on a GPU the last gives the event of its last copy. With
    `verify`, an image that has its whole file in it is checked on the way.
    """

    def __init__(
        self, transfers: Transfers, image: Image, memory: Tensor, verify: bool = False
    ) -> None:
        self.image, self.memory = image, memory
        checked = verify and image.data_at is not None
        self.digest = FileDigest(transfers.reader, image) if checked else None
        self.futures: list[Future[Any]] = []
        self.requests: list[ReadRequest] = []
        self._transfers = transfers
        self.abandoned = False

    def wait(self) -> None:
        """Return when computations may use the weights. Raises what went wrong on the way."""
        event = self._event()
        if event is not None:
            self._transfers.stream.order_after(event)

    def finish(self) -> None:
        """Return when the weights are there, for every thread and stream. Raises as `wait`."""
        event = self._event()
        if event is not None:
            event.synchronize()

    def abandon(self) -> None:
        """Do no more of it than is already started; `wait` then raises DiskReadError."""
        self.abandoned = True
        for request in self.requests:
            request.abandon()

    def settle(self) -> None:
        """Return when nothing that this has not ordered before later uses of the memory is written.

        Then `recycle` may be called, whether it went well or not.
        """
        lost = f"{self.image.file.path}: the reading threads died or were forked away"
        for parts in (self.futures, self.requests):
            self._transfers.clock.join(parts, lambda: self._transfers.alive, lost)

    def add(self, request: ReadRequest) -> None:
        """Take note of reads that an `abandon` has to reach."""
        self.requests.append(request)
        if self.abandoned:
            request.abandon()

    def check(self) -> None:
        """Raise DiskReadError when this was abandoned."""
        if self.abandoned:
            raise DiskReadError(f"{self.image.file.path}: the read was abandoned")

    def _event(self) -> Event | None:
        self.settle()
        event: Event | None = None
        for future in self.futures:
            event = future.result()
        return event


class Transfers(ABC):
    """Moves weights from files and host memory to the device, beside the computation.

    host_staging: buffers in host memory that it needs; see `plan_residency`. copied_bytes: that
    `copy_unit` has brought from host memory to the device. buffer_bytes: of each of these buffers.
    """

    host_staging = buffer_bytes = 0

    def __init__(self, device: torch.device, reader: DiskReader | None = None) -> None:
        self.device = device
        self.reader = reader if reader is not None else DiskReader()
        self.copied_bytes = 0
        self._instrumentation = PLAIN
        self.clock = self.reader.clock
        self._finisher = self.clock.workers(1, "qoff-transfer")
        self._threads: list[Workers | Copies] = [self._finisher]
        self._stream: CopyStream | None = None  # of a GPU
        self._tiers: TierArenas | None = None
        self._staging = torch.empty(0, dtype=torch.uint8)

    @property
    def alive(self) -> bool:
        """Whether all threads are there."""
        return self.reader.alive and all(threads.alive for threads in self._threads)

    @property
    def copying_s(self) -> float:
        """Seconds in which `copied_bytes` were on their way; 0 where they take no thread's time."""
        return 0.0

    @property
    def stream(self) -> CopyStream:
        """The copy stream of a GPU. Raises DiskReadError when it is not open."""
        if self._stream is None:
            raise DiskReadError("the transfers are closed")
        return self._stream

    def open(
        self, residency: Residency, instrumentation: Instrumentation = PLAIN
    ) -> Mapping[str, Arena]:
        """Allocate the arenas "device" and "host" of a residency, and staging memory in them.

        Raises BudgetError.
        """
        self._instrumentation = instrumentation
        sizes = {"device": residency.device_bytes, "host": residency.host_bytes}
        self._tiers = TierArenas(sizes, self._stream, instrumentation.pages)
        staging = residency.cpu_staging_bytes
        self._staging = self._tiers.arenas["host"].alloc(staging, "staging for repacking")
        return self._tiers.arenas

    @property
    def sweeps(self) -> bool:
        """Whether jobs of the CPU may wait for reads from disk, without Python."""
        return False

    def in_place(self, instrumentation: Instrumentation) -> bool:
        """Whether what is in host memory is computed with there, as the device's memory is it."""
        return False

    @property
    def poison(self) -> bool:
        """Whether memory that holds nothing is filled with 0xFF."""
        return self._instrumentation.poison

    @abstractmethod
    def read_unit(self, image: Image, memory: Tensor, verify: bool, after: Mark) -> UnitRead:
        """Start filling device memory with an image, once the computations up to `after` are done.

        Units arrive in the order of the calls. With `verify`, an image that has its whole file in
        it is compared with the file's checksum (ChecksumError).
        """

    @abstractmethod
    def copy_unit(self, image: Image, source: Tensor, memory: Tensor, after: Mark) -> UnitRead:
        """Start copying an image from host memory to the device, after `after`, in call order."""

    @abstractmethod
    def save(self, memory: Tensor, host: Tensor) -> None:
        """Copy device memory to host memory, before anything else that is started comes to it.

        `copy_unit` may have `host` as its source at once.
        """

    @abstractmethod
    def recycle(self, memory: Tensor) -> Mark:
        """Mark the end of all use of `memory`, which now holds nothing."""

    def load_host(
        self, image: Image, memory: Tensor, verify: bool, lane: str = "disk to host"
    ) -> UnitRead:
        """Start filling host memory with an image, as it shall lie on the device.

        Weights are read straight into their places. Repacking, widening and checksums take one
        more thread; the staging memory for repacking holds one unit.
        """
        read = UnitRead(self, image, memory, verify)
        if not image.repacked:
            read.futures.append(self._start(read, image.ranges, memory, lane))
        if image.repacked or image.widened or read.digest is not None:
            read.futures.append(self._finisher.submit(partial(self._finish, read, lane)))
        return read

    def read_floats(self, file: WeightFile, entry: TensorEntry) -> Tensor:
        """A tensor of a file that is not quantized. Raises DiskReadError."""
        found = read_weight(file, entry)
        assert isinstance(found, Tensor)
        return found

    def close(self) -> None:
        """Stop; transfers under way fail. Joins all threads, gives the arenas up."""
        with ExitStack() as all_of_it:  # whatever of it fails
            if self._tiers is not None:
                all_of_it.callback(self._tiers.close)
            for threads in reversed(self._threads):
                all_of_it.callback(threads.close)
            self._staging = torch.empty(0, dtype=torch.uint8)
            self.reader.close()  # which ends what the others wait for

    def _start(
        self, read: UnitRead, ranges: Sequence[FileRange], memory: Tensor, lane: str
    ) -> ReadRequest:
        """Start reading ranges of the image's file to their places in `memory`."""
        request = self._submit(read.image, ranges, memory)
        read.add(request)
        timeline, asked = self._instrumentation.timeline, self.clock.now()
        label = read.image.label

        def note(ended: Future[None]) -> None:  # without `read`: a circle would keep its memory
            if timeline is not None and ended.exception() is None:
                timeline.arrived(lane, label, asked, sum(r.nbytes for r in ranges))

        request.add_done_callback(note)
        return request

    def _submit(self, image: Image, ranges: Sequence[FileRange], memory: Tensor) -> ReadRequest:
        parts = [(r.offset, memory[r.at : r.at + r.nbytes]) for r in ranges]
        return self.reader.submit_parts(image.file.path, parts)

    def _finish(self, read: UnitRead, lane: str) -> None:
        """Check and repack or widen an image; one that is repacked is read by this, too."""
        image, raw = read.image, read.memory
        if image.repacked:
            raw = self._staging[: image.raw_bytes]
            self._start(read, image.ranges, raw, lane)
        self.clock.result(read.requests[-1])
        if read.digest is not None:
            read.digest.update(0, raw)
        if image.repacked:
            _repack(image, raw, read.memory)
        elif image.widened:
            image.widen(read.memory)


def _repack(image: Image, raw: Tensor, memory: Tensor) -> None:
    """Write every weight of the raw image into its place, in its packing there."""
    for name, target in image.views(memory).items():
        source = view(image.raw[name], raw)
        if isinstance(source, Tensor) and isinstance(target, Tensor):
            target.copy_(source)
        elif isinstance(source, QTensor) and isinstance(target, QTensor):
            if source.packing != target.packing:
                repack_into(source, target)
            else:
                target.codes.copy_(source.codes)
                target.scale_min.copy_(source.scale_min)
