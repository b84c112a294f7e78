"""The answers of a job on disk: appended, forced there block by block, and found again.

The file of answers is the journal. Beside it lie one of what failed, and a header (`OUT.job`) that
says what the answers are answers to. A process that is killed leaves at most a torn last block.
"""

from __future__ import annotations

import fcntl
import json
import operator
import os
import re
import secrets
from array import array
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qoff.checkpoint.staging import sync_directory
from qoff.errors import ArgumentError, DiskReadError, DiskWriteError, FormatError, io_errors
from qoff.schema import read_object, shown

from .lines import Bits

BLOCK = 64  # requests whose answers are forced to disk together, at most
_VERSION = 2  # before, lines of blanks were requests
_ID = re.compile(r"batch_req_(\w+)_(\d{1,15})")
_ANEW = "--overwrite starts anew"
_HASHES = {  # which say nothing to anyone
    "model": "model has other contents",
    "requests": "requests have other contents",
}


@dataclass(frozen=True)
class Places:
    """Where the files of a job are."""

    output: Path
    errors: Path

    @property
    def header(self) -> Path:
        return Path(f"{self.output}.job")

    @property
    def sorting(self) -> Path:
        return Path(f"{self.output}.sorting")


class Journal:
    """What is done of a job, and where more is written.

    says: what the answers depend on; all of it must be as it was, or ArgumentError names what is
    not. overwrite: forget what is there. samples: lines of output that a request has. requests: how
    many there are; lines of others are damaged. Raises FormatError for files that are damaged
    beyond their last block or not those of a job, ArgumentError where another process writes them,
    DiskReadError and DiskWriteError.
    """

    block = BLOCK

    def __init__(
        self,
        places: Places,
        says: Mapping[str, Any],
        *,
        overwrite: bool = False,
        samples: int = 1,
        requests: int = 1 << 32,
    ) -> None:
        self.places, self._samples, self._requests = places, samples, requests
        self.done = Bits()
        self.completed = self.failed = 0  # requests
        with io_errors(places.header, DiskWriteError, "name a file in a folder you can write to"):
            self._lock = _locked(places.header)
        try:
            with io_errors(places.header, DiskReadError):
                self._open(json.loads(json.dumps(says)), overwrite)
        except BaseException:
            self.close()
            raise

    def _open(self, says: dict[str, Any], overwrite: bool) -> None:
        places = self.places
        new = overwrite or places.header.stat().st_size == 0
        if new:
            self._begin(says, overwrite)
        else:
            self.job = _check_header(places.header, says)
        with io_errors(places.sorting, DiskWriteError):
            places.sorting.unlink(missing_ok=True)
        self.completed = self._take_up(places.output, self._samples)
        self.failed = self._take_up(places.errors, 1)
        with io_errors(places.output, DiskWriteError), places.output.open("ab"):
            sync_directory(places.output.parent)

    def _begin(self, says: dict[str, Any], overwrite: bool) -> None:
        """Empty files and a header. It comes last: until then there is no job."""
        places = self.places
        for path in (places.output, places.errors):
            with io_errors(path, DiskWriteError):
                if path.exists() and path.stat().st_size and not overwrite:
                    places.header.unlink()  # which was made for its lock alone
                    raise ArgumentError(
                        f"{path} is there, but no job of qoff that it belongs to; choose another "
                        f"file, or {_ANEW}"
                    )
        with io_errors(places.header, DiskWriteError):
            os.ftruncate(self._lock, 0)
            os.fsync(self._lock)
            for path in (places.output, places.errors):
                path.unlink(missing_ok=True)
                sync_directory(path.parent)  # no old answers beside the new header
            self.job = secrets.token_hex(8)
            header = {"version": _VERSION, "job": self.job, "block": BLOCK, **says}
            with places.header.open("wb") as file:
                file.write(json.dumps(header, indent=2).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())

    def _take_up(self, path: Path, samples: int) -> int:
        """Find what is done in a file, cut what is torn; how many requests those are."""
        if not path.exists():
            return 0
        count = end = bad = after = 0
        with io_errors(path, DiskReadError), path.open("rb") as file:
            for at, line in enumerate(file, 1):
                number = None if bad else self._number(path, line)
                if number is None:
                    bad, after = bad or at, after + bool(bad)
                elif number >= 0:
                    if number in self.done:
                        raise FormatError(f"{path}: line {at} is there twice; {_ANEW}")
                    self.done.add(number)
                    count += 1
                    end = file.tell()
            size = file.seek(0, os.SEEK_END)
        if after > BLOCK * samples:
            raise FormatError(
                f"{path}: line {bad} is damaged, and not at the end, where a killed process "
                f"leaves its last lines; correct it, or {_ANEW}"
            )
        if end < size:
            with io_errors(path, DiskWriteError), path.open("r+b") as file:
                file.truncate(end)
                os.fsync(file.fileno())
        return count

    def write(self, numbers: list[int], output: list[bytes], errors: list[bytes]) -> None:
        """Append lines, and wait until they are on disk. numbers: requests that are done by it."""
        for path, lines in ((self.places.output, output), (self.places.errors, errors)):
            if lines:
                with io_errors(path, DiskWriteError):
                    self._append(path, b"".join(lines))
        for number in numbers:
            self.done.add(number)
        self.failed += len(errors)
        self.completed += len(numbers) - len(errors)

    def _append(self, path: Path, data: bytes) -> None:
        new = not path.exists()
        with path.open("ab") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if new:
            sync_directory(path.parent)

    def sort(self) -> None:
        """Bring the answers into the order of the requests; a kill leaves one order or the other.

        Takes 16 bytes of memory a request.
        """
        starts, ends = array("q"), array("q")
        places = self.places
        with io_errors(places.output, DiskWriteError), places.output.open("rb") as file:
            ordered, last, start = True, -1, 0
            for line in file:
                number = self._number(places.output, line)
                if number is None or number < 0:
                    continue
                while len(starts) <= number:
                    starts.append(-1)
                    ends.append(-1)
                starts[number], ends[number] = start, file.tell()
                start, ordered, last = file.tell(), ordered and number > last, number
            if ordered:
                return
            with places.sorting.open("wb") as out:
                for start, end in zip(starts, ends, strict=True):
                    if start >= 0:
                        file.seek(start)
                        out.write(file.read(end - start))
                out.flush()
                os.fsync(out.fileno())
        with io_errors(places.output, DiskWriteError):
            places.sorting.rename(places.output)
            sync_directory(places.output.parent)

    def _number(self, path: Path, line: bytes) -> int | None:
        """The request that a line completes; -1: none yet; None: the line is no whole one.

        Raises FormatError for a line of another job.
        """
        if not line.endswith(b"}\n"):
            return None
        try:
            found: Any = json.loads(line)
            if "index" in found:
                last = self._samples - 1  # an error of all has no sample
                whole = (found.get("sample", last) if "error" in found else found["sample"]) == last
                job, number = found.get("job", self.job), found["index"]
            else:
                match = _ID.fullmatch(found["id"])
                if match is None:
                    return None
                job, number, whole = match[1], int(match[2]), True
            number = operator.index(number)
        except (ValueError, TypeError, KeyError, RecursionError):
            return None
        if job != self.job:
            raise FormatError(
                f"{path}: has lines of another job than {self.places.header}; choose another file, "
                f"or {_ANEW}"
            )
        if not 0 <= number < self._requests:
            return None
        return number if whole else -1

    def close(self) -> None:
        """Let other processes have the job; idempotent."""
        lock, self._lock = self._lock, -1
        if lock >= 0:
            with suppress(OSError):  # nothing was written through it that is not on disk
                os.close(lock)


def _locked(path: Path) -> int:
    """Open a file, made if need be, that no other process has locked."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ArgumentError(f"{path}: another process is at work on this job") from None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check_header(path: Path, says: dict[str, Any]) -> str:
    """The name of the job. Raises ArgumentError, saying what differs, for another one."""
    found = read_object(path, _ANEW)
    version = found.get("version")
    if isinstance(version, int) and version < _VERSION:
        raise FormatError(f"{path}: the job was begun by an earlier version of qoff; {_ANEW}")
    if version != _VERSION or not isinstance(found.get("job"), str):
        raise FormatError(f"{path}: is not the header of a job; {_ANEW}")
    differs = [
        _HASHES.get(name) or f"{name} was {shown(was)} and is {shown(now)}"
        for name, was, now in _pairs({name: found.get(name) for name in says}, says)
    ]
    if differs:
        raise ArgumentError(f"{path}: the job that was begun is another: {'; '.join(differs)}. "
                            f"Go on with what it had, or {_ANEW}")  # fmt: skip
    return str(found["job"])


def _pairs(found: dict[str, Any], says: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """What differs, field by field of objects in objects, which either may lack."""
    for name in says | found:
        was, now = found.get(name), says.get(name)
        if isinstance(now, dict) and isinstance(was, dict):
            yield from ((f"{name} {key}", a, b) for key, a, b in _pairs(was, now))
        elif was != now and (was, now) != (None, {}):  # what jobs of before did not name
            yield name, was, now
