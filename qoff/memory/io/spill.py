"""SpillFile: one preallocated file for what does not fit the memory."""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from pathlib import Path

from torch import Tensor

from qoff.errors import BudgetError, DiskReadError, DiskWriteError
from qoff.memory.arena import PAGE
from qoff.memory.instrumentation import PLAIN, Instrumentation

from .disk import DiskReader, ReadRequest
from .workers import Workers

Pwritev = Callable[[int, Sequence[memoryview], int], int]


class SpillFile:
    """`nbytes` bytes on disk, around the page cache where the file system allows it.

    The file has no name from the start, so that its space is free again when the process has ended,
    however it does. reader: does the reading, and is not closed with this. pwritev replaces
    `os.pwritev` in tests. Raises BudgetError when `folder` has no room, DiskWriteError when no file
    can be made there.
    """

    def __init__(
        self,
        folder: Path,
        nbytes: int,
        reader: DiskReader,
        *,
        instrumentation: Instrumentation = PLAIN,
        pwritev: Pwritev = os.pwritev,
    ) -> None:
        self.nbytes = nbytes
        self.folder = folder
        self.written = 0  # bytes
        self.timeline = instrumentation.timeline
        self._reader = reader
        self._pwritev = pwritev
        self._fd = _nameless(folder)
        try:
            _allocate(self._fd, folder, nbytes)
            self._direct = _try_direct(self._fd)
        except BaseException:
            os.close(self._fd)
            raise
        # Another file description: the reader asks for O_DIRECT by itself.
        self._path = Path(f"/proc/{os.getpid()}/fd/{self._fd}")
        self._reads: set[Future[None]] = set()  # under way
        self._lock = threading.Lock()
        self._workers = Workers(2, "qoff-spill")

    def read(self, offset: int, dest: Tensor) -> ReadRequest:
        """Start reading into `dest`, uint8 on the host; whole pages are read directly.

        Raises DiskReadError when the file is closed.
        """
        if self._fd < 0:
            raise DiskReadError(f"{self.folder}: the spill file is closed")
        request = self._reader.submit(self._path, offset, dest)
        self._reads.add(request)
        request.add_done_callback(self._reads.discard)
        return request

    def write(self, offset: int, source: Tensor) -> Future[None]:
        """Start writing `source`, uint8: whole pages in memory that is aligned to a page.

        It must not change before the future is done, which ends with DiskWriteError when the write
        fails.
        """
        assert offset % PAGE == source.nbytes % PAGE == source.data_ptr() % PAGE == 0
        assert offset + source.nbytes <= self.nbytes
        job = _Write(self, offset, source)
        self._workers.submit([job])
        return job.done

    def close(self) -> None:
        """Wait for reads and running writes, fail the other writes, give the space back.

        May be repeated.
        """
        if self._fd < 0:
            return
        self._workers.close()
        wait(list(self._reads))
        self._reader.forget(self._path)  # its descriptor would keep the space, and the next file's
        os.close(self._fd)
        self._fd = -1

    def write_now(self, offset: int, source: memoryview) -> None:
        """Write in the calling thread, all of it."""
        done = 0
        while done < len(source):
            direct = self._direct  # the other thread may turn it off meanwhile
            try:
                count = self._pwritev(self._fd, [source[done:]], offset + done)
            except OSError as error:
                if error.errno == errno.EINVAL and direct:
                    self._direct = False
                    _set_direct(self._fd, 0)
                    continue
                raise DiskWriteError(
                    f"{self.folder}: writing {len(source):,} bytes to the spill file failed: "
                    f"{error.strerror or error}"
                ) from error
            if count == 0:
                raise DiskWriteError(f"{self.folder}: the spill file takes no more bytes")
            done += count
        with self._lock:
            self.written += done


class _Write:
    """A job: one write."""

    def __init__(self, file: SpillFile, offset: int, source: Tensor) -> None:
        self.done: Future[None] = Future()
        self._file = file
        self._offset = offset
        self._source = source

    def run(self) -> None:
        start = time.perf_counter()
        try:
            self._file.write_now(self._offset, self._source.numpy().data)
        except Exception as error:
            self.fail(error)
            return
        timeline = self._file.timeline
        if timeline is not None:
            stop, nbytes = time.perf_counter(), self._source.nbytes
            timeline.add("host to disk", "spill", start, stop, nbytes)
        self.done.set_result(None)

    def fail(self, error: Exception) -> None:
        if self.done.done():
            return
        if not isinstance(error, DiskWriteError):
            cause, error = error, DiskWriteError(f"{self._file.folder}: not written: {error}")
            error.__cause__ = cause
        self.done.set_exception(error)


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


def _allocate(fd: int, folder: Path, nbytes: int) -> None:
    """Take the space now, so that it is not missing later."""
    if nbytes == 0:
        return
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        free = os.statvfs(folder)
        raise BudgetError(
            f"disk: the spill file needs {nbytes:,} bytes, and {folder} has "
            f"{free.f_bavail * free.f_frsize:,} free ({error.strerror}); name another spill_folder"
        ) from error


def _try_direct(fd: int) -> bool:
    try:
        _set_direct(fd, os.O_DIRECT)
    except OSError:
        return False
    return True


def _set_direct(fd: int, direct: int) -> None:
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    fcntl.fcntl(fd, fcntl.F_SETFL, (flags & ~os.O_DIRECT) | direct)
