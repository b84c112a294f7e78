"""A place that is filled completely or not at all: built in a hidden directory, then moved."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

_NEW, _OLD = "new", "old"  # in the hidden directory: what is built, and what it replaces


@contextmanager
def staging(place: Path) -> Iterator[Path]:
    """Give an empty directory beside `place` to build in; `publish` moves it there.

    It lies in a hidden directory that is removed at the end, with what was not published. A lock on
    that directory, which the system drops when a process dies, tells writers at work from what a
    killed one left; the latter is removed first. Raises OSError.
    """
    for folder in _hidden(place):
        _remove_unlocked(folder, place)
    hidden = Path(tempfile.mkdtemp(prefix=_prefix(place), dir=place.parent))
    descriptor = -1
    try:
        descriptor = os.open(hidden, os.O_RDONLY)
        _lock(descriptor)
        (hidden / _NEW).mkdir()
        yield hidden / _NEW
    finally:
        _discard(hidden, place)
        if descriptor >= 0:
            os.close(descriptor)


def publish(built: Path, place: Path) -> None:
    """Move what was built to `place`, and what is there, if anything, out of it. Raises OSError.

    If the process dies between the two moves, the next `staging` of the place puts the old back.
    """
    sync_directory(built)
    if os.path.lexists(place):
        place.rename(built.parent / _OLD)
    built.rename(place)
    sync_directory(place.parent)


def sync_directory(folder: Path) -> None:
    """Wait until the entries of a directory are on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def sigterm_as_exit() -> Iterator[None]:
    """Let SIGTERM end the process through its `finally` blocks, unless the program handles it."""
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _prefix(place: Path) -> str:
    return f".{place.name}.qoff-"


def _hidden(place: Path) -> list[Path]:
    return [p for p in place.parent.iterdir() if p.name.startswith(_prefix(place)) and p.is_dir()]


def _lock(descriptor: int) -> bool:
    """Lock a directory if nobody has; on a file system without locks nothing can be locked."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _remove_unlocked(hidden: Path, place: Path) -> None:
    try:
        descriptor = os.open(hidden, os.O_RDONLY)
    except FileNotFoundError:
        return  # its writer has just ended
    try:
        if _lock(descriptor):
            _discard(hidden, place)
    finally:
        os.close(descriptor)


def _discard(hidden: Path, place: Path) -> None:
    """Remove a hidden directory, after putting back what had not been replaced yet."""
    if os.path.lexists(hidden / _OLD) and not os.path.lexists(place):
        (hidden / _OLD).rename(place)
    shutil.rmtree(hidden, ignore_errors=True)
