"""SpillFile: one preallocated file for what does not fit the memory."""

from __future__ import annotations

import errno
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TypeAlias

from torch import Tensor

from qoff.errors import BudgetError, DiskReadError, DiskWriteError
from qoff.memory.arena import PAGE
from qoff.memory.instrumentation import PLAIN, Instrumentation

from .direct import set_direct
from .disk import DiskReader, ReadRequest
from .ranges import copy_range
from .runs import Fill, Run

Pwritev = Callable[[int, Sequence[memoryview], int], int]
SlotFill: TypeAlias = tuple[Sequence[tuple[int, Tensor]], int, int]
Failed: TypeAlias = Callable[[BaseException], None]


class SpillFile:
    """`nbytes` bytes on disk, around the page cache where the file system allows it.

    The file has no name from the start, so that its space is free again when the process has ended,
    however it does. reader: does the reading, and is not closed with this. pwritev replaces
    `os.pwritev` in tests. called: what the user knows `folder` as.
    Raises BudgetError when `folder` has no room, DiskWriteError when no file can be made there.
    """

    def __init__(
        self,
        folder: Path,
        nbytes: int,
        reader: DiskReader,
        *,
        instrumentation: Instrumentation = PLAIN,
        pwritev: Pwritev = os.pwritev,
        called: str = "spill_folder",
    ) -> None:
        self.nbytes = nbytes
        self.folder = folder
        self.written = 0  # bytes
        self._instrumentation = instrumentation
        self._reader = reader
        self._pwritev = pwritev
        self._called = called
        self._fd, self._direct = self._open()
        # Another file description: the reader asks for O_DIRECT by itself.
        self._path = Path(f"/proc/{os.getpid()}/fd/{self._fd}")
        self._reads: set[Future[None]] = set()  # under way
        self._lists: set[ReadRequest] = set()  # of these, which wait for slots
        self._lock = threading.Lock()
        self._clock = instrumentation.clock
        self._workers = self._clock.workers(2, f"qoff-spill {folder}", DiskWriteError)

    def read(self, offset: int, dest: Tensor) -> ReadRequest:
        """Start reading into `dest`, uint8 on the host; whole pages are read directly.

        Raises DiskReadError when the file is closed.
        """
        return self.read_parts([(offset, dest)])

    def read_parts(self, parts: Sequence[tuple[int, Tensor]]) -> ReadRequest:
        """`read` for several (offset, dest) at once."""
        self._check_open()
        return self._noted(self._reader.submit_parts(self._path, parts))

    def read_runs(self, runs: Sequence[Run], dest: Tensor) -> ReadRequest:
        """`read` for many short runs, which come to their places in `dest`."""
        self._check_open()
        return self._noted(self._reader.submit_runs(self._path, runs, dest))

    def read_list(self, fills: Sequence[SlotFill], failed: Failed) -> ReadRequest:
        """Start reading into slots as they are given back; see `DiskReader.submit_list`.

        fills: parts as for `read_parts`, words and turn of the slot.
        """
        self._check_open()
        listed = [Fill(self._path, *fill) for fill in fills]
        request = self._noted(self._reader.submit_list(listed, failed))
        self._lists.add(request)
        request.add_done_callback(self._lists.discard)
        return request

    def write(self, offset: int, source: Tensor) -> Future[None]:
        """Start writing `source`, uint8: whole pages in memory that is aligned to a page.

        It must not change before the future is done, which ends with DiskWriteError when the write
        fails.
        """
        self._check_pages(offset, source)
        return self._workers.submit(partial(self._write, offset, source))

    def read_here(self, offset: int, dest: Tensor) -> None:
        """`read` in the calling thread, behind no other read. Raises DiskReadError."""
        self._check_open()
        self._reader.read_here(self._path, offset, dest)

    def write_here(self, offset: int, source: Tensor) -> None:
        """`write` in the calling thread, behind no other write. Raises DiskWriteError."""
        self._check_pages(offset, source)
        self._write(offset, source)

    def copy_to(self, fd: int, place: int, offset: int, nbytes: int) -> None:
        """Copy what has been written to another file, in the calling thread. Raises OSError."""
        with self._buffered() as own:
            copy_range(own, offset, fd, place, nbytes)

    def copy_from(self, fd: int, place: int, offset: int, nbytes: int) -> None:
        """Copy from another file, in the calling thread. Raises OSError."""
        with self._buffered() as own:
            copy_range(fd, place, own, offset, nbytes)

    @contextmanager
    def _buffered(self) -> Iterator[int]:
        """A descriptor of the file that takes any size and memory."""
        fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        try:
            yield fd
        finally:
            os.close(fd)

    def close(self) -> None:
        """Wait for reads and running writes, fail the other writes, give the space back.

        May be repeated.
        """
        if self._fd < 0:
            return
        with ExitStack() as all_of_it:  # whatever of it fails
            all_of_it.callback(self._close_file)
            # Its descriptor would keep the space, and the next file's.
            all_of_it.callback(self._reader.forget, self._path)
            all_of_it.callback(lambda: self._clock.wait(self._reads))
            for request in list(self._lists):  # no slot may ever be free
                request.abandon()
            self._workers.close()

    def _check_pages(self, offset: int, source: Tensor) -> None:
        assert offset % PAGE == source.nbytes % PAGE == source.data_ptr() % PAGE == 0
        assert offset + source.nbytes <= self.nbytes

    def _check_open(self) -> None:
        if self._fd < 0:
            raise DiskReadError(f"{self.folder}: the spill file is closed")

    def _noted(self, request: ReadRequest) -> ReadRequest:
        self._reads.add(request)
        request.add_done_callback(self._reads.discard)
        return request

    def _open(self) -> tuple[int, bool]:
        """The file's descriptor, and whether it goes around the page cache."""
        fd = _nameless(self.folder)
        try:
            _allocate(fd, self.folder, self.nbytes, self._called)
            return fd, set_direct(fd, True)
        except BaseException:
            os.close(fd)
            raise

    def _close_file(self) -> None:
        fd, self._fd = self._fd, -1
        os.close(fd)

    def _write(self, offset: int, source: Tensor) -> None:
        """Write in the calling thread, all of it."""
        done, left = 0, source.numpy().data
        with self._instrumentation.span("host to disk", "spill", source.nbytes):
            while left:
                count = self._write_once(offset + done, left, source.nbytes)
                done, left = done + count, left[count:]
        with self._lock:
            self.written += done

    def _write_once(self, offset: int, view: memoryview, total: int) -> int:
        direct = self._direct  # the other thread may turn it off meanwhile
        try:
            count = self._pwritev(self._fd, [view], offset)
        except OSError as error:
            if error.errno == errno.EINVAL and direct:
                set_direct(self._fd, False)
                self._direct = False
                return self._write_once(offset, view, total)
            raise DiskWriteError(
                f"{self.folder}: writing {total:,} bytes to the spill file failed: "
                f"{error.strerror or error}"
            ) from error
        if count == 0:
            raise DiskWriteError(f"{self.folder}: the spill file takes no more bytes")
        return count


def _nameless(folder: Path) -> int:
    """Open a new file without a name for reading and writing."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
                raise
        fd, path = tempfile.mkstemp(prefix="qoff-spill-", dir=folder)
        Path(path).unlink()
        return fd
    except OSError as error:
        raise DiskWriteError(f"{folder}: cannot create a spill file: {error.strerror}") from error


def _allocate(fd: int, folder: Path, nbytes: int, called: str) -> None:
    """Take the space now, so that it is not missing later."""
    if nbytes == 0:
        return
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except (OSError, OverflowError) as error:
        free = os.statvfs(folder)
        raise BudgetError(
            f"disk: the spill file needs {nbytes:,} bytes, and {folder} has "
            f"{free.f_bavail * free.f_frsize:,} bytes free ({error}); name another {called}"
        ) from error
