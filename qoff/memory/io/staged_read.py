"""StagedRead: a unit on its way from disk through staging buffers to a GPU."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, cast

from torch import Tensor

from qoff.errors import DiskReadError
from qoff.memory.plan import FileRange, Image

from .copy_stream import CopyStream, Event
from .disk import DiskReader, ReadRequest
from .transfers import FileDigest, Mark, Threads, join


@dataclass(eq=False)
class Buffer:
    """A staging buffer, and the copy from it that must have ended before it is read into."""

    memory: Tensor
    copied: Event | None = None


class Staging(Threads, Protocol):
    """The staging buffers, and the threads and the stream that reads and copies go through."""

    @property
    def reader(self) -> DiskReader: ...

    @property
    def stream(self) -> CopyStream:
        """Raises DiskReadError when it is not open."""

    def take_buffer(self, image: Image) -> Buffer:
        """A buffer that nothing is copied from any more. Raises DiskReadError on close."""

    def give_buffer(self, buffer: Buffer) -> None:
        """Hand a buffer back, with `copied` set if it is being copied from."""

    def start_reads(
        self, image: Image, ranges: Sequence[FileRange], memory: Tensor
    ) -> list[ReadRequest]:
        """Start reading ranges of a file into a buffer."""

    def send(self, job: Send) -> None:
        """Have a buffer that is being read into copied when it is complete."""


class StagedRead:
    """One unit on its way from disk, in pieces of a staging buffer (one, where it streams)."""

    def __init__(
        self,
        transfers: Staging,
        image: Image,
        memory: Tensor,
        verify: bool,
        after: Mark | None,
    ) -> None:
        self.transfers = transfers
        self.image = image
        self.sent: Future[None] = Future()  # all copies are on the stream
        self.abandoned = threading.Event()
        self.reads: list[ReadRequest] = []
        self._memory = memory
        self._verify = verify
        self._after = after
        self._digest: FileDigest | None = None
        self._copied: Event | None = None
        self._guard = threading.Lock()

    def pieces(self, nbytes: int) -> list[Fill]:
        """The jobs that bring it, each with up to so many bytes of the image."""
        starts = range(0, self.image.nbytes, nbytes)
        return [Fill(self, at, min(at + nbytes, self.image.nbytes)) for at in starts]

    def wait(self) -> None:
        self.settle()
        self.sent.result()
        assert self._copied is not None
        self.transfers.stream.order_after(self._copied)

    def finish(self) -> None:
        self.settle()
        self.sent.result()
        assert self._copied is not None
        self._copied.synchronize()

    def abandon(self) -> None:
        self.abandoned.set()
        with self._guard:
            for read in self.reads:
                read.abandon()

    def settle(self) -> None:
        join([self.sent], self.transfers, self.image)

    def fail(self, error: Exception) -> None:
        with self._guard:
            if not self.sent.done():
                self.sent.set_exception(error)

    def started(self, reads: list[ReadRequest]) -> None:
        """Take note of reads that an `abandon` has to reach."""
        with self._guard:
            self.reads += reads
        if self.abandoned.is_set():
            self.abandon()

    def arrived(self, at: int, buffer: Buffer, nbytes: int) -> None:
        """Check a piece that is complete in its buffer and enqueue its copy."""
        if self.abandoned.is_set():
            raise DiskReadError(f"{self.image.file.path}: the read was abandoned")
        piece = buffer.memory[:nbytes]
        last = at + nbytes == self.image.nbytes
        if self._verify:
            if self._digest is None:
                self._digest = FileDigest(self.transfers.reader, self.image)
            self._digest.update(at, piece)
            if last:
                self._digest.check()
        after = cast("Event | None", self._after)
        target = self._memory[at : at + nbytes]
        self._copied = self.transfers.stream.copy(piece, target, after, timed=False).ended
        buffer.copied = self._copied
        with self._guard:
            if last and not self.sent.done():
                self.sent.set_result(None)


@dataclass(frozen=True, eq=False)
class Fill:
    """A job: start reading the bytes at..stop of an image into a buffer."""

    read: StagedRead
    at: int
    stop: int

    def run(self) -> None:
        read, transfers = self.read, self.read.transfers
        if read.sent.done():  # another piece has failed
            return
        if read.abandoned.is_set():
            self.fail(DiskReadError(f"{read.image.file.path}: the read was abandoned"))
            return
        try:
            buffer = transfers.take_buffer(read.image)
        except Exception as error:
            self.fail(error)
            return
        ranges = clip(read.image.ranges, self.at, self.stop)
        reads = transfers.start_reads(read.image, ranges, buffer.memory)
        read.started(reads)
        transfers.send(Send(read, self.at, self.stop - self.at, buffer, reads))

    def fail(self, error: Exception) -> None:
        self.read.fail(error)


@dataclass(frozen=True, eq=False)
class Send:
    """A job: when a buffer is complete, enqueue its copy and hand it back."""

    read: StagedRead
    at: int
    nbytes: int
    buffer: Buffer
    reads: list[ReadRequest]

    def run(self) -> None:
        read = self.read
        try:
            join(self.reads, read.transfers, read.image)  # all: the buffer is quiet on failure too
            for part in self.reads:
                part.result()
            if not read.sent.done():
                read.arrived(self.at, self.buffer, self.nbytes)
        except Exception as error:
            read.fail(error)
        finally:
            read.transfers.give_buffer(self.buffer)

    def fail(self, error: Exception) -> None:
        self.read.fail(error)


def clip(ranges: Sequence[FileRange], at: int, stop: int) -> list[FileRange]:
    """The parts of `ranges` in the bytes at..stop of their image, in an image that starts there."""
    parts = []
    for r in ranges:
        first, end = max(r.at, at), min(r.at + r.nbytes, stop)
        if first < end:
            parts.append(FileRange(r.offset + first - r.at, end - first, first - at))
    return parts
