"""A file that grows window by window; what a killed process has written of it stays good.

A line of JSON says what the file is of. Then come records: length and CRC-32 of what follows, two
little-endian 32-bit integers, and an NPZ archive of a window's arrays. A record that is torn, or
damaged, ends the file.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from qoff.errors import ArgumentError, DiskReadError, DiskWriteError, FormatError, QoffError
from qoff.schema import shown

Arrays = Mapping[str, NDArray[Any]]
_HEAD = struct.Struct("<II")
_LINE = 1 << 20  # bytes of the first line, at most


class Records:
    """The windows in a file. windows: their numbers.

    says: what the file is to be of. Where it is of something else, ArgumentError names what
    differs; where there is none, it is begun. Without `says` the file is only read. Raises
    FormatError for what is no such file, ArgumentError where another process writes it,
    DiskReadError and DiskWriteError.
    """

    def __init__(self, path: Path, says: Mapping[str, Any] | None = None) -> None:
        self.path, self._at = path, dict[int, int]()
        with _io_errors(path, DiskReadError if says is None else DiskWriteError):
            self._file: BinaryIO = path.open("rb") if says is None else _locked(path)
        try:
            with _io_errors(path, DiskReadError):
                self._open(None if says is None else json.loads(json.dumps(says)))
        except BaseException:
            self.close()
            raise

    @property
    def windows(self) -> list[int]:
        return list(self._at)

    def read(self, window: int) -> dict[str, NDArray[Any]]:
        """The arrays of a window. Raises FormatError where they are damaged."""
        with _io_errors(self.path, DiskReadError):
            self._file.seek(self._at[window])
            data = self._next()
        if data is None:
            raise FormatError(f"{self.path}: window {window} is damaged; remove the file")
        return _arrays(data)

    def append(self, window: int, arrays: Arrays) -> None:
        """Add a window, and wait until it is on disk."""
        with _io_errors(self.path, DiskWriteError):
            at = self._file.seek(0, os.SEEK_END)
            data = io.BytesIO()
            np.savez(data, window=np.array(window), **arrays)  # type: ignore[arg-type]
            packed = data.getvalue()
            self._file.write(_HEAD.pack(len(packed), zlib.crc32(packed)) + packed)
            self._flush()
        self._at[window] = at

    def remove(self) -> None:
        """Remove the file, and close it."""
        self.path.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Let other processes have the file; idempotent."""
        with suppress(OSError):  # nothing was written that is not on disk
            self._file.close()

    def _open(self, says: dict[str, Any] | None) -> None:
        first = self._file.readline(_LINE)
        if says is not None and not first.endswith(b"\n"):  # new, or torn in its first line
            if first and not json.dumps(says).encode().startswith(first):
                raise FormatError(f"{self.path}: is another file; choose another place")
            self._file.seek(0)
            self._file.truncate()
            self._file.write(json.dumps(says).encode() + b"\n")
            self._flush()
            self.says = says
            return
        try:
            found = json.loads(first)
            assert isinstance(found, dict)
        except (ValueError, AssertionError) as error:
            raise FormatError(f"{self.path}: is another file, or damaged; remove it") from error
        if says is not None and (differs := [x for x in says if found.get(x) != says[x]]):
            words = "; ".join(
                f"{x} was {shown(found.get(x))}, is {shown(says[x])}" for x in differs
            )
            raise ArgumentError(f"{self.path}: is of something else: {words}; remove it")
        self.says = found
        self._scan(cut=says is not None)

    def _scan(self, cut: bool) -> None:
        end = self._file.tell()
        while (data := self._next()) is not None:
            self._at[int(_arrays(data)["window"])] = end
            end = self._file.tell()
        if cut:
            self._file.truncate(end)

    def _next(self) -> bytes | None:
        """The record here; None where no whole one is."""
        head = self._file.read(_HEAD.size)
        if len(head) < _HEAD.size:
            return None
        length, check = _HEAD.unpack(head)
        data = self._file.read(length)
        return data if len(data) == length and zlib.crc32(data) == check else None

    def _flush(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())


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
    return file


@contextmanager
def _io_errors(path: Path, kind: type[DiskReadError | DiskWriteError]) -> Iterator[None]:
    try:
        yield
    except QoffError:
        raise
    except OSError as error:
        raise kind(f"{path}: {error.strerror or error}") from error
