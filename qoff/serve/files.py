"""Files that clients upload, and those that batches answer with: on disk, across restarts.

A file's place is its id, which is random; what a client calls it is only told back.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from qoff.api.errors import ApiError
from qoff.checkpoint.staging import sync_directory
from qoff.errors import ArgumentError
from qoff.schema import read_object

_ID = re.compile(r"file-[0-9a-f]{32}")
_MOST = 100_000  # files
_NAME = 255  # characters of a file's name


class FileStore:
    """Files in a folder that no other process uses. Threads may share it.

    max_file_bytes: of a file that is uploaded; max_bytes: of all files together. Raises
    ArgumentError where another process uses the folder or it is none, OSError where it cannot be.
    """

    def __init__(self, folder: Path, max_file_bytes: int, max_bytes: int) -> None:
        self.folder, self.max_file_bytes, self._max_bytes = folder, max_file_bytes, max_bytes
        self.uploads, self._files = folder / "uploads", folder / "files"
        if folder.exists() and not folder.is_dir():
            raise ArgumentError(f"{folder}: is no folder; files and batches need one")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(self.uploads, ignore_errors=True)  # cut off
            for one in (self.uploads, self._files):
                one.mkdir(mode=0o700, exist_ok=True)
            self._known = self._read()
        except BlockingIOError:
            os.close(self._lock)
            raise ArgumentError(f"{folder}: another server keeps its files there") from None
        except BaseException:
            os.close(self._lock)
            raise
        self._changing = threading.Lock()
        self._coming = 0  # bytes of files that are being sent

    def _read(self) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for path in self._files.glob("*.json"):
            if not path.with_suffix("").exists():
                path.unlink()  # a process was killed before the file came here
            elif _ID.fullmatch(path.stem):
                found[path.stem] = read_object(path)
        for path in self._files.iterdir():
            if path.suffix != ".json" and path.name not in found:
                path.unlink()  # a process was killed while it wrote or removed it
        return dict(sorted(found.items(), key=lambda one: (one[1]["created_at"], one[0])))

    def close(self) -> None:
        """Let other processes have the folder; idempotent."""
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)

    @staticmethod
    def new_id() -> str:
        """The id of a file that is to be added."""
        return f"file-{secrets.token_hex(16)}"

    @contextmanager
    def coming(self) -> Iterator[Callable[[int], None]]:
        """A function that keeps room for so many bytes more; it raises ApiError without room."""
        mine = 0

        def more(nbytes: int) -> None:
            nonlocal mine
            with self._changing:
                self._check_room(nbytes)
                self._coming += nbytes
                mine += nbytes

        try:
            yield more
        finally:
            with self._changing:
                self._coming -= mine

    def _check_room(self, nbytes: int) -> None:
        used = self._coming + sum(one["bytes"] for one in list(self._known.values()))
        if used + nbytes > self._max_bytes or len(self._known) >= _MOST:
            raise ApiError(413, "the server keeps no more files; delete some", code="files_full",
                           headers={"Connection": "close"})  # fmt: skip

    def add(self, path: Path, name: str, purpose: str, file_id: str) -> dict[str, Any]:
        """Take over a file that lies in this folder; doing so twice changes nothing.

        Where the disk does not take it (OSError), it stays where it was.
        """
        place = self._files / file_id
        new = path.exists()
        said = {
            "id": file_id,
            "object": "file",
            "bytes": (path if new else place).stat().st_size,
            "created_at": int(time.time()),
            "filename": name[:_NAME],
            "purpose": purpose,
            "status": "processed",
        }
        try:
            # First: data of which nothing is said goes.
            write_json(place.with_suffix(".json"), said)
            if new:
                with path.open("rb") as file:
                    os.fsync(file.fileno())
                path.rename(place)
                sync_directory(self._files)
        except OSError:
            if new:
                with suppress(FileNotFoundError):
                    place.rename(path)
                place.with_suffix(".json").unlink(missing_ok=True)
            raise
        with self._changing:
            self._known[file_id] = said
        return said

    def get(self, file_id: str) -> dict[str, Any]:
        """What is known of a file. Raises ApiError where there is none."""
        found = self._known.get(file_id)
        if found is None:
            raise ApiError(404, f"there is no file {file_id[:100]!r}", code="file_not_found")
        return found

    def path(self, file_id: str) -> Path:
        """Where a file is. Raises ApiError where there is none."""
        return self._files / self.get(file_id)["id"]

    def all(self) -> list[dict[str, Any]]:
        """What is known of all files, the oldest first."""
        with self._changing:
            return list(self._known.values())

    def remove(self, file_id: str) -> None:
        """Forget a file. Raises ApiError where there is none."""
        place = self.path(file_id)
        with self._changing:
            self._known.pop(file_id, None)
        place.with_suffix(".json").unlink(missing_ok=True)
        place.unlink(missing_ok=True)


def write_json(path: Path, said: Any) -> None:
    """Replace a file; a process that is killed leaves the old one or the new one."""
    fresh = path.with_suffix(".new")
    try:
        with fresh.open("wb") as file:
            file.write(json.dumps(said).encode())
            file.flush()
            os.fsync(file.fileno())
        fresh.rename(path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)
