"""DirectFile: exact reads from one file that go around the page cache where that is possible."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from qoff.errors import DiskReadError

SECTOR, BLOCK = 512, 4096  # O_DIRECT: offset, length and address in memory are multiples of one
_REFUSED = (errno.EINVAL, errno.ENOTSUP)  # a file system without O_DIRECT, at open or at read

Preadv = Callable[[int, Sequence[memoryview], int], int]


class _SectorsRefusedError(Exception):
    """Direct reads of this file need larger blocks than a sector."""


class DirectFile:
    """A file open for reading, with O_DIRECT unless the file system refuses it.

    `direct` tells which it is now, `block` what direct reads are aligned to. Methods may be called
    from many threads. Raises DiskReadError when the file cannot be opened.
    """

    def __init__(self, path: Path, direct: bool = True, preadv: Preadv = os.preadv) -> None:
        self.path = path
        self.direct, self.block = direct, BLOCK
        self._preadv = preadv
        try:
            self._fd = self._open()
        except OSError as error:
            raise DiskReadError(f"{path}: cannot be opened: {error.strerror}") from error
        if self.direct and _reads_sectors(self._fd):
            self.block = SECTOR
        if path.parts[:2] == ("/", "proc"):  # a file without a name: say where it lies
            self.path = Path(os.readlink(path))  # noqa: PTH115  # "... (deleted)"

    def read(self, offset: int, dest: memoryview, address: int, bounce: memoryview) -> None:
        """Fill `dest`, which lies at `address`, with the bytes from `offset` on.

        What is not aligned goes through `bounce`: page-aligned memory of one or more blocks that
        nobody else uses meanwhile. Raises DiskReadError on an error or when the file ends early.
        """
        if not self.direct:
            self._fill(offset, dest, len(dest), 1)
            return
        try:
            self._read_direct(offset, dest, address, bounce, self.block)
        except _SectorsRefusedError:
            self.block = BLOCK
            self._read_direct(offset, dest, address, bounce, BLOCK)

    def close(self) -> None:
        """Close the file. No read may be in progress. Raises DiskReadError."""
        try:
            os.close(self._fd)
        except OSError as error:
            raise DiskReadError(f"{self.path}: cannot be closed: {error.strerror}") from error

    def fileno(self) -> int:
        """The descriptor."""
        return self._fd

    def _open(self) -> int:
        flags = os.O_RDONLY | os.O_CLOEXEC
        if self.direct:
            try:
                return os.open(self.path, flags | os.O_DIRECT)
            except OSError as error:
                if error.errno not in _REFUSED:
                    raise
                self.direct = False
        return os.open(self.path, flags)

    def _read_direct(
        self, offset: int, dest: memoryview, address: int, bounce: memoryview, block: int
    ) -> None:
        """Raises _SectorsRefusedError where blocks are too small."""
        whole = 0
        if offset % block == 0 and address % block == 0:
            whole = len(dest) // block * block
            self._fill(offset, dest[:whole], whole, block)
        while whole < len(dest):
            whole += self._bounced(offset + whole, dest[whole:], bounce, block)

    def _bounced(self, offset: int, dest: memoryview, bounce: memoryview, block: int) -> int:
        """Read a first part of `dest` by whole blocks into `bounce`; returns the part's length."""
        skip = offset % block
        wanted = min(len(dest), len(bounce) - skip)
        blocks = -(-(skip + wanted) // block) * block
        self._fill(offset - skip, bounce[:blocks], skip + wanted, block)
        dest[:wanted] = bounce[skip : skip + wanted]
        return wanted

    def _fill(self, offset: int, view: memoryview, wanted: int, block: int) -> None:
        """Read until the first `wanted` bytes of `view` are there; the rest is slack for blocks."""
        got = 0
        while got < wanted:
            count = self._read_once(offset + got, view[got:], block)
            got += count
            if got < wanted and (count == 0 or (self.direct and got % block)):
                raise DiskReadError(
                    f"{self.path}: short read: wanted {wanted:,} bytes at offset {offset:,}, got "
                    f"{got:,}; the file is damaged or was truncated, convert or copy it again"
                )

    def _read_once(self, offset: int, view: memoryview, block: int) -> int:
        direct = self.direct  # another thread may turn it off meanwhile
        try:
            return self._preadv(self._fd, [view], offset)
        except OSError as error:
            if error.errno == errno.EINVAL and direct:
                if block == SECTOR:
                    raise _SectorsRefusedError from error
                set_direct(self._fd, False)
                self.direct = False
                return self._read_once(offset, view, block)
            raise DiskReadError(
                f"{self.path}: reading {len(view):,} bytes at offset {offset:,} failed: "
                f"{error.strerror or error}"
            ) from error


def _reads_sectors(fd: int) -> bool:
    """Whether a file takes a direct read that is aligned to a sector only; others it may refuse."""
    try:
        os.preadv(fd, [memoryview(mmap.mmap(-1, BLOCK))[SECTOR : 2 * SECTOR]], SECTOR)
    except OSError:
        return False
    return True


def set_direct(fd: int, direct: bool) -> bool:
    """Turn O_DIRECT of an open file on or off; false where that cannot be."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | (os.O_DIRECT if direct else 0))
    except OSError:
        return False
    return True
