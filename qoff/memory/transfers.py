"""Transfers: the one interface to asynchrony, and its implementation with host threads.

The weight store says what shall lie where and waits for it; how the bytes travel is decided here.
On a GPU the same calls become: `recycle` records an event on the compute stream, `read_unit` reads
into pinned staging memory and enqueues one copy behind that event on a copy stream, and
`UnitRead.wait` makes the compute stream wait for the copy.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, wait
from hashlib import sha256
from typing import Protocol

import torch
from torch import Tensor

from qoff.checkpoint import check_digest
from qoff.errors import DiskReadError
from qoff.kernels.packing import repack_into
from qoff.kernels.qtensor import QTensor

from .arena import Arena
from .disk import DiskReader, ReadRequest
from .image import Image, view
from .residency import Residency
from .workers import Workers

_WATCH_S = 1.0  # how often a waiting thread looks whether the reading ones still live

Mark = object  # a point in the order of computations; opaque, made by `recycle`


class UnitRead(Protocol):
    """A transfer under way."""

    def wait(self) -> None:
        """Return when computations may use the weights. Raises what went wrong on the way."""

    def abandon(self) -> None:
        """Do no more of it than is already started; `wait` then raises DiskReadError."""

    def settle(self) -> None:
        """Return when nothing more of it will be written, whether it went well or not."""


class Transfers(Protocol):
    """Moves weights from files to the device, beside the computation."""

    @property
    def reader(self) -> DiskReader:
        """What reads the files; also for small reads straight into host memory."""

    def open(self, residency: Residency) -> Arena:
        """Allocate what a residency calls for: the device arena, and staging memory."""

    def read_unit(self, image: Image, memory: Tensor, verify: bool, after: Mark | None) -> UnitRead:
        """Start filling device memory with an image, once the computations up to `after` are done.

        Units arrive in the order of the calls. With `verify`, an image that has its whole file in
        it is compared with the file's checksum (ChecksumError).
        """

    def recycle(self, memory: Tensor, poison: bool) -> Mark:
        """Mark the end of all use of `memory`; `poison` fills it with 0xFF bytes, NaN in floats."""

    def close(self) -> None:
        """Stop; reads under way fail. Joins all threads."""


class ThreadTransfers:
    """Transfers for a device that is the CPU: computations are done when their calls return.

    Weights are read straight into their slots. Repacking and checksums take one more thread; the
    staging memory for repacking is part of the device arena, and holds one unit.
    """

    def __init__(self, reader: DiskReader | None = None) -> None:
        self._reader = reader if reader is not None else DiskReader()
        self._workers = Workers(1, "qoff-transfer")
        self._staging = torch.empty(0, dtype=torch.uint8)

    @property
    def reader(self) -> DiskReader:
        return self._reader

    @property
    def alive(self) -> bool:
        """Whether all threads are there."""
        return self._reader.alive and self._workers.alive

    def open(self, residency: Residency) -> Arena:
        arena = Arena("device", residency.device_bytes)
        self._staging = arena.alloc(residency.staging_bytes, "staging for repacking")
        return arena

    def read_unit(self, image: Image, memory: Tensor, verify: bool, after: Mark | None) -> UnitRead:
        read = _ThreadRead(self, image, memory, verify and image.data_at is not None)
        read.start()
        return read

    def recycle(self, memory: Tensor, poison: bool) -> Mark:
        if poison:
            memory.fill_(0xFF)
        return None

    def close(self) -> None:
        self._reader.close()
        self._workers.close()
        self._staging = torch.empty(0, dtype=torch.uint8)

    def submit(self, read: _ThreadRead) -> None:
        """Have `read.run` called on the thread for repacking and checksums."""
        self._workers.submit([read])

    def staging(self, nbytes: int) -> Tensor:
        """The first bytes of the staging memory; for that thread alone."""
        return self._staging[:nbytes]


class _ThreadRead:
    """One unit on its way; a job of the transfer thread where more than reading is to be done."""

    def __init__(
        self, transfers: ThreadTransfers, image: Image, memory: Tensor, verify: bool
    ) -> None:
        self._transfers = transfers
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

    def abandon(self) -> None:
        self._abandoned.set()
        for read in self._reads:
            read.abandon()

    def settle(self) -> None:
        self._join(self._futures())

    def _futures(self) -> list[Future[None]]:
        """Everything that must have ended before the memory is quiet."""
        extra = [] if self._finished is None else [self._finished]
        return [*extra, *self._reads]

    def _join(self, futures: Sequence[Future[None]]) -> None:
        for future in futures:
            while not future.done():
                if wait([future], timeout=_WATCH_S).not_done and not self._transfers.alive:
                    path = self._image.file.path
                    raise DiskReadError(f"{path}: the reading threads died or were forked away")

    def _read(self, raw: Tensor) -> None:
        reader, path = self._transfers.reader, self._image.file.path
        for r in self._image.ranges:
            self._reads.append(reader.submit(path, r.offset, raw[r.at : r.at + r.nbytes]))
        if self._abandoned.is_set():
            self.abandon()

    def _finish(self) -> None:
        raw = self._memory
        if self._image.repacked:
            raw = self._transfers.staging(self._image.raw_bytes)
            self._read(raw)
        self._join(self._reads)  # all of them: staging memory must be quiet when this unit fails
        for read in self._reads:
            read.result()
        if self._verify:
            check_whole(self._transfers.reader, self._image, raw)
        if self._image.repacked:
            _repack(self._image, raw, self._memory)


def check_whole(reader: DiskReader, image: Image, raw: Tensor) -> None:
    """Compare a raw image that has its whole file in it with the file's checksum.

    Raises ChecksumError when they differ.
    """
    file, at = image.file, image.data_at
    assert at is not None
    header = torch.empty(file.data_start, dtype=torch.uint8)
    reader.submit(file.path, 0, header, urgent=True).result()
    digest = sha256(header.numpy().data)
    digest.update(raw[at : at + file.nbytes - file.data_start].numpy().data)
    check_digest(file, digest.hexdigest())


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
