"""A place that is filled completely or not at all: built in a hidden directory, then moved."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_NEW, _OLD = "new", "old"  # in the hidden directory: what is built, and what it replaces


@contextmanager
def staging(place: Path) -> Iterator[Path]:
    """Give an empty directory beside `place` to build in; `publish` moves it there.

    It lies in a hidden directory that is removed at the end, with what was not published. A lock on
    that directory, which the system drops when a process dies, tells writers at work from what a
    killed one left; the latter is removed first, where it is a directory of the same user: a link
    is never followed. Raises OSError.
    """
    for folder in _hidden(place):
        _remove_unlocked(folder, place)
    hidden, descriptor = _create(place)
    try:
        (hidden / _NEW).mkdir()
        yield hidden / _NEW
    finally:
        try:
            _discard(hidden, place)
        finally:
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
def parents(place: Path) -> Iterator[None]:
    """Make the directories that `place` lies in; those made are removed again if still empty.

    Raises OSError.
    """
    made = [p for p in place.parents if not p.exists()]
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        for folder in made:
            with suppress(OSError):
                folder.rmdir()


def _prefix(place: Path) -> str:
    return f".{place.name}.qoff-"


def _hidden(place: Path) -> list[Path]:
    name = re.compile(re.escape(_prefix(place)) + "[a-z0-9_]+")
    return [p for p in place.parent.iterdir() if name.fullmatch(p.name) and _own(p)]


def _own(folder: Path) -> bool:
    """Whether this is a directory, not a link to one, that this user has made."""
    try:
        found = folder.lstat()
    except OSError:  # its writer has just ended
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


def _create(place: Path) -> tuple[Path, int]:
    """Make a hidden directory; returns it and the descriptor that holds its lock."""
    while True:
        hidden = Path(tempfile.mkdtemp(prefix=_prefix(place), dir=place.parent))
        try:
            descriptor = os.open(hidden, _DIRECTORY)
        except FileNotFoundError:
            continue  # a writer that came just now took it for a leftover
        try:
            _lock(descriptor)
            if os.path.samestat(os.fstat(descriptor), hidden.stat()):
                return hidden, descriptor
        except (BlockingIOError, FileNotFoundError):
            pass
        except BaseException:
            os.close(descriptor)  # or its lock would keep the directory from who removes it
            shutil.rmtree(hidden, ignore_errors=True)
            raise
        os.close(descriptor)


def _lock(descriptor: int) -> bool:
    """Lock a directory; False where the file system has no locks.

    Raises BlockingIOError when another has it.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True


def _remove_unlocked(hidden: Path, place: Path) -> None:
    try:
        descriptor = os.open(hidden, _DIRECTORY)
    except OSError:
        return  # its writer has just ended, or it is not ours to touch
    try:
        if _own(hidden) and _lock(descriptor):
            _discard(hidden, place)
    except BlockingIOError:
        pass  # its writer is at work
    finally:
        os.close(descriptor)


def _discard(hidden: Path, place: Path) -> None:
    """Remove a hidden directory, after putting back what had not been replaced yet."""
    if os.path.lexists(hidden / _OLD) and not os.path.lexists(place):
        (hidden / _OLD).rename(place)
    shutil.rmtree(hidden, ignore_errors=True)
