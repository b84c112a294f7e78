"""A file that grows window by window; what a killed process has written of it stays good.

A line of JSON says what the file is of. Then come records: the number of a window, the length of
what follows and the CRC-32 of both and of that, three little-endian 32-bit integers, and an NPZ
archive of the window's arrays. A record that is torn ends the file.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import struct
import zipfile
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from qoff.checkpoint.staging import sync_directory
from qoff.errors import (
    ArgumentError,
    DiskReadError,
    DiskWriteError,
    FormatError,
    io_errors,
)
from qoff.schema import shown

Arrays = Mapping[str, NDArray[Any]]
_HEAD, _CRC = struct.Struct("<II"), struct.Struct("<I")
_LINE = 1 << 20  # bytes of the first line, at most


class Records:
    """The windows in a file. windows: their numbers.

    says: what the file is to be of. Where it is of something else, ArgumentError names what
    differs; where there is none, the first window begins it. Without `says` the file is only read.
    Raises FormatError for what is no such file, ArgumentError where another process writes it,
    DiskReadError and DiskWriteError.
    """

    def __init__(self, path: Path, says: Mapping[str, Any] | None = None) -> None:
        self.path, self.says, self._at = path, dict[str, Any](), dict[int, int]()
        self._begun = True
        with io_errors(path, DiskReadError if says is None else DiskWriteError):
            self._file: BinaryIO = path.open("rb") if says is None else _locked(path)
        try:
            with io_errors(path, DiskReadError):
                self._open(None if says is None else _plain(says))
        except BaseException:
            self.close()
            raise

    @property
    def windows(self) -> list[int]:
        return list(self._at)

    def read(self, window: int) -> dict[str, NDArray[Any]]:
        """The arrays of a window. Raises FormatError where they are damaged."""
        with io_errors(self.path, DiskReadError):
            self._file.seek(self._at[window])
            found = self._next()
        if found is None:
            raise FormatError(
                f"{self.path}: window {window} is damaged; choose another place, or remove it"
            )
        return _arrays(found[1])

    def agree(self, says: Mapping[str, Any]) -> None:
        """Let a file that is not begun say this, too. Raises ArgumentError where it differs."""
        says = _plain(says)
        if not self._begun:
            self.says |= says
        if differs := [x for x in says if self.says.get(x) != says[x]]:
            words = "; ".join(
                f"{x} was {shown(self.says.get(x))}, is {shown(says[x])}" for x in differs
            )
            raise ArgumentError(
                f"{self.path}: is of something else: {words}; choose another place, or remove it"
            )

    def append(self, window: int, arrays: Arrays) -> None:
        """Add a window, and wait until it is on disk."""
        with io_errors(self.path, DiskWriteError):
            at = self._file.seek(0, os.SEEK_END)
            line = b"" if self._begun else json.dumps(self.says).encode() + b"\n"
            data = io.BytesIO()
            np.savez(data, **arrays)  # type: ignore[arg-type]
            packed = data.getvalue()
            head = _HEAD.pack(window, len(packed))
            self._file.write(line + head + _CRC.pack(_check(head, packed)) + packed)
            self._file.flush()
            os.fsync(self._file.fileno())
            if line:
                sync_directory(self.path.parent)
        self._at[window], self._begun = at + len(line), True

    def share(self) -> None:
        """Let other processes write the file, which is only read from now on."""
        fcntl.flock(self._file, fcntl.LOCK_UN)

    def remove(self) -> None:
        """Remove the file, and close it."""
        self.path.unlink(missing_ok=True)
        self._begun = True
        self.close()

    def close(self) -> None:
        """Let other processes have the file, which is removed if it has no window; idempotent."""
        with suppress(OSError):  # nothing was written that is not on disk
            if not self._begun and not self._file.closed:
                self.path.unlink(missing_ok=True)
            self._file.close()

    def _open(self, says: dict[str, Any] | None) -> None:
        first = self._file.readline(_LINE)
        if says is not None and not first.endswith(b"\n"):  # new, or torn in its first line
            ours = json.dumps(says).encode()[:-1]  # more may follow
            if not (ours.startswith(first) or first.startswith(ours)):
                raise FormatError(f"{self.path}: is another file; choose another place")
            self._file.truncate(0)
            self.says, self._begun = says, False
            return
        try:
            found = json.loads(first)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise FormatError(
                f"{self.path}: is another file, or damaged; choose another place, or remove it"
            )
        self.says = found
        if says is not None:
            self.agree(says)
        self._scan(writing=says is not None)

    def _scan(self, writing: bool) -> None:
        """Find the windows; to write behind them, all have to be whole."""
        end, size = self._file.tell(), os.fstat(self._file.fileno()).st_size
        while (found := self._next() if writing else self._skipped(size)) is not None:
            self._at[found[0]] = end
            end = self._file.tell()
        if writing:
            self._file.truncate(end)

    def _skipped(self, size: int) -> tuple[int] | None:
        """The number of the record here, whose bytes are not read; None where no whole one is."""
        head = self._file.read(_HEAD.size + _CRC.size)
        if len(head) < _HEAD.size + _CRC.size:
            return None
        window, length = _HEAD.unpack_from(head)
        return (window,) if self._file.seek(length, os.SEEK_CUR) <= size else None

    def _next(self) -> tuple[int, bytes] | None:
        """Number and bytes of the record here; None where no whole one is."""
        head, check = self._file.read(_HEAD.size), self._file.read(_CRC.size)
        if len(check) < _CRC.size:
            return None
        window, length = _HEAD.unpack(head)
        data = self._file.read(length)
        whole = len(data) == length and _CRC.unpack(check)[0] == _check(head, data)
        return (window, data) if whole else None


def _plain(says: Mapping[str, Any]) -> dict[str, Any]:
    """As a line of JSON has it."""
    found: dict[str, Any] = json.loads(json.dumps(says))
    return found


def _check(head: bytes, data: bytes) -> int:
    return zlib.crc32(data, zlib.crc32(head))


def _arrays(data: bytes) -> dict[str, NDArray[Any]]:
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as found:
            return dict(found)
    except (ValueError, zipfile.BadZipFile, EOFError) as error:
        raise FormatError(f"a record is no NPZ archive ({error})") from error


def _locked(path: Path) -> BinaryIO:
    """Open a file to read and append, made if need be, that no other process has so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644), "r+b")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ArgumentError(f"{path}: another process is at work on this evaluation") from None
    except OSError:  # a file system without locks
        file.close()
        raise
    if not os.fstat(file.fileno()).st_nlink:  # removed by the process that had it
        file.close()
        return _locked(path)
    return file
