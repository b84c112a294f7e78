"""The n-th call on files fails: SQLite's way to find what an error leaves behind."""

from __future__ import annotations

import errno
import fcntl
import io
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

# By what is called: where its path or descriptor is among the arguments.
_CALLS: dict[str, tuple[object, int]] = {
    "open": (os, 0),
    "close": (os, 0),
    "fsync": (os, 0),
    "fstat": (os, 0),
    "stat": (os, 0),
    "mkdir": (os, 0),
    "rename": (os, 0),
    "listdir": (os, 0),
    "rmdir": (os, 0),
    "preadv": (os, 0),
    "pwritev": (os, 0),
    "copy_file_range": (os, 1),
    "posix_fallocate": (os, 0),
    "flock": (fcntl, 0),
}
_MOST = 1000  # calls of a run
SHORT = -1  # instead of an errno: fewer bytes than asked for, as at the end of a file


class Faults:
    """Counts calls on files under `root`; the one of number `nth`, from 1, fails in some way.

    how: an errno, or SHORT for a read that comes up short (other calls: EIO).
    """

    def __init__(self, root: Path, nth: int, how: int) -> None:
        self._root, self._nth, self._how = str(root), nth, how
        self._lock = threading.Lock()
        self.calls = 0

    @property
    def happened(self) -> bool:
        return self.calls >= self._nth

    def concerns(self, place: object) -> bool:
        """Whether a path or descriptor is of a file under the root."""
        if isinstance(place, int):
            try:
                place = os.readlink(f"/proc/self/fd/{place}")  # noqa: PTH115
            except OSError:
                return False
        return str(place).startswith(self._root)

    def strike(self, reads: bool) -> bool:
        """Count a call. Raises OSError if it is the one; True: it shall come up short."""
        with self._lock:
            self.calls += 1
            mine = self.calls == self._nth
        if mine and self._how == SHORT and reads:
            return True
        if mine:
            number = errno.EIO if self._how == SHORT else self._how
            raise OSError(number, os.strerror(number))
        return False

    def call(self, name: str, real: Callable[..., Any], at: int) -> Callable[..., Any]:
        def faulty(*arguments: Any, **options: Any) -> Any:
            if not arguments or not self.concerns(arguments[at]):
                return real(*arguments, **options)
            if name == "close":
                real(*arguments)  # the system does close it
                self.strike(reads=False)
                return None
            short = self.strike(reads=name == "preadv")
            return 0 if short or name == "fsync" else real(*arguments, **options)

        return faulty

    def opened(self, path: Any, mode: str = "r", *rest: Any, **options: Any) -> Any:
        """`io.open` of a file whose calls are counted."""
        if not self.concerns(path):
            return _OPEN(path, mode, *rest, **options)
        self.strike(reads=False)
        raw = _Raw(path, mode.replace("b", "").replace("t", ""), self)
        buffered = io.BufferedReader(raw) if raw.readable() else io.BufferedWriter(raw)
        if "b" in mode:
            return buffered
        return io.TextIOWrapper(buffered, options.get("encoding") or "utf-8")


class _Raw(io.FileIO):
    def __init__(self, path: Any, mode: str, faults: Faults) -> None:
        super().__init__(path, mode)
        self._faults = faults

    def readinto(self, buffer: Any) -> int | None:
        return 0 if self._faults.strike(reads=True) else super().readinto(buffer)

    def readall(self) -> bytes:
        return b"" if self._faults.strike(reads=True) else super().readall()

    def write(self, data: Any) -> int | None:
        self._faults.strike(reads=False)
        return super().write(data)


_OPEN = io.open


@contextmanager
def faulty_files(root: Path, nth: int, how: int) -> Iterator[Faults]:
    """Let the n-th call on files under `root` fail meanwhile."""
    faults = Faults(root, nth, how)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(io, "open", faults.opened)
        for name, (module, at) in _CALLS.items():
            patch.setattr(module, name, faults.call(name, getattr(module, name), at))
        yield faults


def each_call(
    root: Path, how: int, run: Callable[[], object], step: int = 1
) -> Iterator[BaseException | None]:
    """Run something with its first call failing, then its second, and so on, until none does.

    Yields the error that it ended with each time, None where it went on without what failed.
    """
    nth = 1
    while True:
        error: BaseException | None = None
        with faulty_files(root, nth, how) as faults:
            try:
                run()
            except Exception as raised:
                error = raised
        assert nth < _MOST, "each run makes more calls: something is left behind by the one before"
        if not faults.happened:
            if error is not None:
                raise error
            return
        yield error
        del error
        nth += step
