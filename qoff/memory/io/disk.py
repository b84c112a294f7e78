"""DiskReader: asynchronous reads by a few threads, large ones in chunks, several in flight."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qoff.checkpoint import Stamp
from qoff.errors import DiskReadError

from .clock import SYSTEM, Clock
from .direct import DirectFile, Preadv
from .runs import Fill, Piece, Run, pieces, split, whole_blocks
from .workers import Workers, when_all

if TYPE_CHECKING:
    from qoff.kernels.cpu.jit.read_queue import ReadQueue
    from qoff.kernels.cpu.jit.reads import BusyWords, ReadList

_BOUNCE = 128 << 10  # bytes per thread for what is not aligned
_PIECES = 32  # of a scattered read that a thread takes at once


@dataclass(frozen=True)
class DiskStats:
    """What a reader has done so far."""

    bytes: int  # delivered
    busy_s: float  # seconds in which at least one read was in flight
    buffered_files: frozenset[Path]  # their file systems refused O_DIRECT


class ReadRequest(Future[None]):
    """The future of one `submit`: done when no byte of it will be written any more."""

    def __init__(self) -> None:
        super().__init__()
        self.abandoned = False

    def abandon(self) -> None:
        """Skip the chunks that have not started; the request then ends with an error."""
        self.abandoned = True

    def follow(self, chunks: Sequence[Future[None]]) -> None:
        """End when all of `chunks` have, with the error of the first that failed."""
        when_all(chunks, self._ended)

    def _ended(self, error: BaseException | None) -> None:
        if error is None:
            self.set_result(None)
        else:
            self.set_exception(error)


class DiskReader:
    """Reads ranges of files into host memory, `threads` at a time, first come first served.

    Requests are split into pieces of `chunk` bytes, so that a large one keeps all threads busy and
    the device's queue never runs dry while one of them is between two reads. On the virtual disk
    they were chosen on (1 to 3 GB/s from one minute to the next) chunks of 256 KiB were slower and
    took more CPU; from 512 KiB and two threads on, differences were within the noise. `direct`
    asks for O_DIRECT; a file whose file system refuses it is read through the page cache and
    listed in `stats.buffered_files`. `preadv` replaces `os.preadv` in tests.
    """

    THREADS, CHUNK = 4, 1 << 20
    IN_FLIGHT = THREADS * CHUNK  # bytes that are asked for at a time, by default

    def __init__(
        self,
        threads: int = THREADS,
        chunk: int = CHUNK,
        direct: bool = True,
        preadv: Preadv = os.preadv,
        clock: Clock = SYSTEM,
    ) -> None:
        if threads < 1 or chunk < 1 or chunk % mmap.PAGESIZE:
            raise ValueError(f"{threads} threads, {chunk} bytes a read: use 1 thread, whole pages")
        self.chunk, self._threads = chunk, threads
        self._direct = direct
        self._preadv = preadv
        self._files: dict[Path, DirectFile] = {}
        self._closed = False
        self._lock = threading.Lock()
        self._local = threading.local()
        self._in_flight = 0
        self._alone_since = 0.0  # less the seconds in which threads read without Python
        self._busy_s = 0.0
        self._bytes = 0
        self._busy: BusyWords | None = None  # of what is read without Python
        self._lists: set[ReadList] = set()  # under way
        self._queues: list[tuple[ReadQueue, Workers]] = []
        self.clock = clock
        self._workers = clock.workers(threads, "qoff-disk")

    @property
    def alive(self) -> bool:
        """Whether the reading threads are there."""
        return self._workers.alive and all(threads.alive for _, threads in self._queues)

    @property
    def queues(self) -> bool:
        """Whether `queue` is to be had: threads that sleep until there is something to read."""
        from qoff.kernels.cpu.jit.futex import SLEEPS

        return SLEEPS and self._preadv is os.preadv and self.clock is SYSTEM

    @property
    def delivered(self) -> tuple[int, float]:
        """Bytes so far, and seconds in which at least one read was in flight."""
        with self._lock:
            without, busy = self._without_python_s(), self._busy_s
            if self._in_flight:
                busy += self.clock.now() - without - self._alone_since
            nbytes = self._bytes + (0 if self._busy is None else self._busy.nbytes)
            return nbytes, busy + without

    @property
    def stats(self) -> DiskStats:
        """Counters since the start."""
        delivered = self.delivered
        with self._lock:
            buffered = frozenset(p for p, f in self._files.items() if not f.direct)
        return DiskStats(*delivered, buffered)

    def stamp(self, path: Path) -> Stamp | None:
        """What a change of the file that is read as `path` changes; None where it has no file."""
        try:
            status = os.fstat(self._file(path).fileno())
        except OSError:
            return None
        return status.st_size, status.st_mtime_ns, status.st_ctime_ns

    def submit(
        self, path: str | Path, offset: int, dest: Tensor, urgent: bool = False
    ) -> ReadRequest:
        """Start reading `dest.numel()` bytes at `offset` of a file into `dest`, uint8 on the host.

        An urgent request goes before all that wait; beside a list it is read here and now. The
        future ends with DiskReadError, naming file and offset, when the file cannot be opened or
        read or is too short.
        """
        return self.submit_parts(path, [(offset, dest)], urgent)

    def submit_parts(
        self, path: str | Path, parts: Sequence[tuple[int, Tensor]], urgent: bool = False
    ) -> ReadRequest:
        """`submit` for several (offset, dest) of a file at once."""
        request = ReadRequest()
        try:
            file = self._file(Path(path))
        except DiskReadError as error:
            request.set_exception(error)
            return request
        chunks = []
        for offset, dest in parts:
            if dest.dtype != torch.uint8 or not dest.is_contiguous() or dest.device.type != "cpu":
                raise ValueError("reads land in contiguous uint8 memory of the host")
            memory, address = dest.numpy().data, dest.data_ptr()
            for start, stop in split(offset, dest.numel(), self.chunk):
                piece = memory[start:stop]
                chunks.append(
                    partial(self._read, request, file, offset + start, piece, address + start)
                )
        if urgent and self._lists:  # all threads may wait for slots
            request.follow([_made(chunk) for chunk in chunks])
        else:
            request.follow([self._workers.submit(chunk, urgent) for chunk in chunks])
        return request

    def read_here(self, path: str | Path, offset: int, dest: Tensor) -> None:
        """As `submit`, in the calling thread and behind no other read. Raises DiskReadError."""
        file, memory = self._file(Path(path)), dest.numpy().data
        self._read(ReadRequest(), file, offset, memory, dest.data_ptr())

    def submit_runs(self, path: Path, runs: Sequence[Run], dest: Tensor) -> ReadRequest:
        """Start reading many short runs of a file into `dest`, some by each thread in turn."""
        request = ReadRequest()
        try:
            file = self._file(path)
        except DiskReadError as error:
            request.set_exception(error)
            return request
        memory, address = dest.numpy().data, dest.data_ptr()
        each = max(1, min(_PIECES, len(runs) // (2 * self._threads)))
        request.follow(
            [
                self._workers.submit(
                    partial(self._read_runs, request, file, runs[i : i + each], memory, address)
                )
                for i in range(0, len(runs), each)
            ]
        )
        return request

    def submit_list(
        self, fills: Sequence[Fill], failed: Callable[[BaseException], None]
    ) -> ReadRequest:
        """Start reading into slots, one after another, each as soon as it is given back.

        No Python runs until all is read, unless a read fails or `preadv` is replaced. failed: told
        what went wrong, at once; the request ends with the first of it. Abandoned, it begins no
        further chunk. Raises DiskReadError where a file cannot be opened.
        """
        from qoff.kernels.cpu.jit.reads import Chunk, ReadList  # compiled when imported

        chunks, places = [], []
        for number, fill in enumerate(fills):
            file = self._file(fill.path)
            descriptor = file.fileno() if self._preadv is os.preadv else -1
            unit = file.block if file.direct else 1
            for offset, dest in fill.parts:
                for piece in pieces(offset, dest.data_ptr(), dest.numel(), self.chunk, unit):
                    start = piece.offset - offset
                    chunks.append(Chunk(descriptor, *piece, number))
                    places.append((file, piece.offset, dest, start, start + piece.wanted))
        reads = ReadList(chunks, [(fill.words, fill.turn) for fill in fills], self._busy_words())
        request = _ListRequest(reads)
        with self._lock:
            self._lists.add(reads)
        request.add_done_callback(lambda _: self._lists.discard(reads))

        def ended(call: Future[None]) -> None:
            error = call.exception()
            if error is not None:
                request.why = request.why or error  # before other threads find the list stopped
                failed(request.why)
                reads.stop()

        calls = []
        try:
            for _ in range(self._threads):
                calls.append(self._workers.submit(partial(self._read_list, request, reads, places)))
                calls[-1].add_done_callback(ended)
        except BaseException:  # an interrupt: nobody would stop it
            reads.stop()
            raise
        request.follow(calls)
        return request

    def queue(self, slots: int, each: int) -> ReadQueue:
        """A queue of so many slots, of up to `each` chunks, with threads of its own that read.

        No Python runs in these. They end with the reader, or before when the queue is stopped.
        Raises DiskReadError when this is closed.
        """
        from qoff.kernels.cpu.jit.read_queue import ReadQueue  # compiled when imported

        queue = ReadQueue(slots, each, self._busy_words())
        with self._lock:
            if self._closed:
                raise DiskReadError("the disk reader is closed")
            threads = self.clock.workers(self._threads, "qoff-disk-queue")
            self._queues.append((queue, threads))
        for _ in range(self._threads):
            threads.submit(queue.serve)
        return queue

    def whole_blocks(self, path: Path, runs: Sequence[Run]) -> list[Piece] | None:
        """Runs as chunks of a `ReadQueue`, without their file, and with places for addresses.

        None where some of it has to go through other memory, as blocks are read, or the file cannot
        be opened. Place 0 is at the start of a page. What follows a run, up to a whole block, may
        be written, but for where other runs are.
        """
        try:
            file = self._file(path)
        except DiskReadError:
            return None
        return whole_blocks(runs, self.chunk, file.block if file.direct else 1)

    def descriptor(self, path: Path) -> int:
        """Of a file that stays open. Raises DiskReadError."""
        return self._file(path).fileno()

    def forget(self, path: Path) -> None:
        """Close a file that will not be read again under this path. No read may be in progress."""
        with self._lock:
            file = self._files.pop(path, None)
        if file is not None:
            file.close()

    def close(self) -> None:
        """Fail what waits, let running reads end, join the threads and close the files."""
        with self._lock:
            self._closed = True
            for reads in list(self._lists):
                reads.stop()
            for queue, _ in self._queues:
                queue.stop()
        for threads in (self._workers, *(threads for _, threads in self._queues)):
            threads.close()
        with self._lock:
            files = list(self._files.values())
            self._files.clear()
        with ExitStack() as all_of_them:
            for file in files:
                all_of_them.callback(file.close)

    def _read(
        self, request: ReadRequest, file: DirectFile, offset: int, dest: memoryview, address: int
    ) -> None:
        """Read one chunk in the calling thread, and count it."""
        self._read_runs(request, file, [Run(offset, 0, len(dest))], dest, address)

    def _read_list(
        self,
        request: _ListRequest,
        reads: ReadList,
        places: Sequence[tuple[DirectFile, int, Tensor, int, int]],
    ) -> None:
        """Read chunks of a list as long as there are some; those that compiled code cannot, too."""
        while (number := reads.read()) is not None:
            file, offset, dest, start, stop = places[number]
            piece = dest.numpy().data[start:stop]
            self._read(request, file, offset, piece, dest.data_ptr() + start)
            reads.done(number)
        if reads.stopped:
            raise request.why or DiskReadError(f"{places[0][0].path}: the read was abandoned")

    def _read_runs(
        self,
        request: ReadRequest,
        file: DirectFile,
        runs: Sequence[Run],
        memory: memoryview,
        address: int,
    ) -> None:
        """Read runs in the calling thread, and count them."""
        if request.abandoned:
            raise DiskReadError(f"{file.path}: the read was abandoned")
        with self._lock:
            if self._in_flight == 0:
                self._alone_since = self.clock.now() - self._without_python_s()
            self._in_flight += 1
        done = 0
        try:
            bounce = self._bounce()
            for run in runs:
                piece = memory[run.dest : run.dest + run.nbytes]
                file.read(run.source, piece, address + run.dest, bounce)
                done += run.nbytes
        finally:
            with self._lock:
                self._bytes += done
                self._in_flight -= 1
                if self._in_flight == 0:
                    now = self.clock.now() - self._without_python_s()
                    self._busy_s += now - self._alone_since

    def _without_python_s(self) -> float:
        """Seconds in which threads have read without Python."""
        return 0.0 if self._busy is None else _busy_ns(self._busy) * 1e-9

    def _busy_words(self) -> BusyWords:
        """What threads count in that read without Python."""
        from qoff.kernels.cpu.jit.reads import BusyWords

        with self._lock:
            self._busy = self._busy or BusyWords()
            return self._busy

    def _file(self, path: Path) -> DirectFile:
        with self._lock:
            if self._closed:
                raise DiskReadError(f"{path}: the disk reader is closed")
            file = self._files.get(path)
            if file is None:
                file = self._files[path] = self._open(path)
            return file

    def _open(self, path: Path) -> DirectFile:
        return DirectFile(path, self._direct, self._preadv)

    def _bounce(self) -> memoryview:
        """Page-aligned memory of the calling thread."""
        if not hasattr(self._local, "bounce"):
            self._local.bounce = memoryview(mmap.mmap(-1, _BOUNCE))
        bounce: memoryview = self._local.bounce
        return bounce


class _ListRequest(ReadRequest):
    """why: the first error, with which all of the list ends."""

    def __init__(self, reads: ReadList) -> None:
        super().__init__()
        self._reads = reads
        self.why: BaseException | None = None

    def abandon(self) -> None:
        super().abandon()
        self._reads.stop()


def _made(call: Callable[[], None]) -> Future[None]:
    """A call that was made here and now."""
    future = Future[None]()
    try:
        call()
    except Exception as error:
        future.set_exception(error)
    else:
        future.set_result(None)
    return future


def _busy_ns(words: BusyWords) -> int:
    """Nanoseconds in which threads have read until now; theirs are counted when a read ends.

    Words are of one moment if they are the same before and behind it: each change has its own time.
    """
    while True:
        found = words.ns, words.reading, words.since
        now = time.perf_counter_ns()
        if not words.lock and found == (words.ns, words.reading, words.since):
            ns, reading, since = found
            return ns + (now - since if reading else 0)
