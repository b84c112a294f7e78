"""ThreadTransfers: transfers by host threads, for a device that is the CPU, and for tests."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import numpy as np
import torch
from torch import Tensor

from qoff.errors import DiskReadError
from qoff.kernels.layout.qtensor import QTensor, repack_into
from qoff.memory.arena import Arena
from qoff.memory.instrumentation import PLAIN, Instrumentation
from qoff.memory.plan import Image, Residency, view

from .disk import DiskReader, ReadRequest
from .lane import DISK_TO_DEVICE, DISK_TO_HOST, HOST_TO_DEVICE, Lane
from .link import Link
from .transfers import Arenas, FileDigest, Mark, UnitRead, join
from .workers import Workers


class ThreadTransfers:
    """Transfers for a device that is the CPU: computations are done when their calls return.

    Weights are read straight into their slots. Repacking and checksums take one more thread, copies
    from host memory another; the staging memory for repacking is part of the device arena, and
    holds one unit. `host_link` slows copies from host memory down, as `preadv` of a `DiskReader`
    does for reads.
    """

    host_staging = 0
    device = torch.device("cpu")

    def __init__(self, reader: DiskReader | None = None, host_link: Link | None = None) -> None:
        self._reader = reader if reader is not None else DiskReader()
        self._workers = Workers(1, "qoff-transfer")
        self._copiers = Workers(1, "qoff-copy")
        self._staging = torch.empty(0, dtype=torch.uint8)
        self.host_link = host_link
        self.copied_bytes = 0
        self.watch(PLAIN)

    @property
    def reader(self) -> DiskReader:
        return self._reader

    @property
    def alive(self) -> bool:
        """Whether all threads are there."""
        return self._reader.alive and self._workers.alive and self._copiers.alive

    def open(self, residency: Residency, instrumentation: Instrumentation = PLAIN) -> Arenas:
        self.watch(instrumentation)
        device = Arena("device", residency.device_bytes)
        host = Arena("host", residency.host_bytes)
        self._staging = device.alloc(residency.staging_bytes, "staging for repacking")
        return Arenas(device, host)

    def read_unit(self, image: Image, memory: Tensor, verify: bool, after: Mark | None) -> UnitRead:
        return self._start(image, memory, verify, self.to_device)

    def load_host(self, image: Image, memory: Tensor, verify: bool) -> UnitRead:
        return self._start(image, memory, verify, self.to_host)

    def copy_unit(
        self, image: Image, source: Tensor, memory: Tensor, after: Mark | None
    ) -> UnitRead:
        copy = _ThreadCopy(self, image, source, memory)
        self.copies.note([copy.done], image.label, source.nbytes)
        self._copiers.submit([copy])
        return copy

    def recycle(self, memory: Tensor) -> Mark:
        if self._poison:
            memory.fill_(0xFF)
        return None

    def close(self) -> None:
        self._reader.close()
        self._workers.close()
        self._copiers.close()
        self._staging = torch.empty(0, dtype=torch.uint8)

    def submit(self, read: _ThreadRead) -> None:
        """Have `read.run` called on the thread for repacking and checksums."""
        self._workers.submit([read])

    def staging(self, nbytes: int) -> Tensor:
        """The first bytes of the staging memory; for that thread alone."""
        return self._staging[:nbytes]

    def _start(self, image: Image, memory: Tensor, verify: bool, lane: Lane) -> UnitRead:
        read = _ThreadRead(self, image, memory, verify and image.data_at is not None, lane)
        read.start()
        return read

    def watch(self, instrumentation: Instrumentation) -> None:
        """Note units in its timeline from now on."""
        timeline, self._poison = instrumentation.timeline, instrumentation.poison
        self.to_device = Lane(timeline, DISK_TO_DEVICE)
        self.to_host = Lane(timeline, DISK_TO_HOST)
        self.copies = Lane(timeline, HOST_TO_DEVICE)


class _ThreadCopy:
    """A job: one unit on its way from host memory."""

    def __init__(
        self, transfers: ThreadTransfers, image: Image, source: Tensor, memory: Tensor
    ) -> None:
        self.done: Future[None] = Future()
        self._transfers = transfers
        self._image = image
        self._source, self._memory = source, memory
        self._abandoned = threading.Event()

    def run(self) -> None:
        transfers, nbytes = self._transfers, self._source.nbytes
        try:
            if transfers.host_link is not None and not self._abandoned.is_set():
                transfers.host_link.pass_through(nbytes)
            if self._abandoned.is_set():
                raise DiskReadError(f"{self._image.file.path}: the copy was abandoned")
            np.copyto(self._memory.numpy(), self._source.numpy())  # without torch's threads
        except Exception as error:
            self.fail(error)
        else:
            transfers.copied_bytes += nbytes
            self.done.set_result(None)

    def fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)

    def wait(self) -> None:
        self.settle()
        self.done.result()

    def finish(self) -> None:
        self.wait()

    def abandon(self) -> None:
        self._abandoned.set()

    def settle(self) -> None:
        join([self.done], self._transfers, self._image)


class _ThreadRead:
    """One unit on its way; a job of the transfer thread where more than reading is to be done."""

    def __init__(
        self, transfers: ThreadTransfers, image: Image, memory: Tensor, verify: bool, lane: Lane
    ) -> None:
        self._transfers = transfers
        self._lane = lane
        self._image = image
        self._memory = memory
        self._verify = verify
        self._reads: list[ReadRequest] = []
        self._finished: Future[None] | None = None
        self._abandoned = threading.Event()

    def start(self) -> None:
        """Queue the reads, unless they have to wait for staging memory to be free."""
        if not self._image.repacked:
            self._read(self._memory)
        if self._image.repacked or self._verify:
            self._finished = Future()
            self._transfers.submit(self)

    def run(self) -> None:
        try:
            self._finish()
        except Exception as error:
            self.fail(error)
        else:
            assert self._finished is not None
            self._finished.set_result(None)

    def fail(self, error: Exception) -> None:
        if self._finished is not None and not self._finished.done():
            self._finished.set_exception(error)

    def wait(self) -> None:
        self.settle()
        for future in self._futures():
            future.result()

    def finish(self) -> None:
        self.wait()

    def abandon(self) -> None:
        self._abandoned.set()
        for read in self._reads:
            read.abandon()

    def settle(self) -> None:
        join(self._futures(), self._transfers, self._image)

    def _futures(self) -> list[Future[None]]:
        """Everything that must have ended before the memory is quiet."""
        extra = [] if self._finished is None else [self._finished]
        return [*extra, *self._reads]

    def _read(self, raw: Tensor) -> None:
        reader, path = self._transfers.reader, self._image.file.path
        for r in self._image.ranges:
            self._reads.append(reader.submit(path, r.offset, raw[r.at : r.at + r.nbytes]))
        self._lane.note(self._reads, self._image.label, self._image.file_bytes)
        if self._abandoned.is_set():
            self.abandon()

    def _finish(self) -> None:
        raw = self._memory
        if self._image.repacked:
            raw = self._transfers.staging(self._image.raw_bytes)
            self._read(raw)
        join(self._reads, self._transfers, self._image)  # all: staging is quiet even on failure
        for read in self._reads:
            read.result()
        if self._verify:
            digest = FileDigest(self._transfers.reader, self._image)
            digest.update(0, raw)
            digest.check()
        if self._image.repacked:
            _repack(self._image, raw, self._memory)


def _repack(image: Image, raw: Tensor, memory: Tensor) -> None:
    """Write every weight of the raw image into its place, in its packing there."""
    for name, entry in image.raw.items():
        source, target = view(entry, raw), view(image.placed[name], memory)
        if isinstance(source, QTensor) and isinstance(target, QTensor):
            if source.packing != target.packing:
                repack_into(source, target)
                continue
            target.codes.copy_(source.codes)
            target.scale_min.copy_(source.scale_min)
        elif isinstance(source, Tensor) and isinstance(target, Tensor):
            target.copy_(source)
