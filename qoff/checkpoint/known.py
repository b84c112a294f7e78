"""Files that were found to be as their checksums say, remembered from process to process."""

from __future__ import annotations

import json
import os
import threading
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import TypeAlias

from qoff.settings import cache_directory

from .layout import WeightFile

Stamp: TypeAlias = tuple[int, int, int]  # bytes, times of modification and of change, in ns


class KnownFiles:
    """Files of a checkpoint that had the checksum of its index when they had a certain stamp.

    A file of which parts alone are read, as of experts or of a large embedding, would have to be
    read whole in every process before they can be trusted: minutes for a large mixture. It is
    compared once; a change of the file is seen by its stamp. Kept in `cache_directory()`; where
    nothing can be written there, nothing is remembered. Methods may be called from many threads.
    """

    def __init__(self, folder: Path) -> None:
        name = sha256(os.fsencode(folder.resolve())).hexdigest()[:16]
        self._path = cache_directory() / "verified" / f"{name}.json"
        self._lock = threading.Lock()
        # Of a file by its name: its checksum and its stamp.
        self._found: dict[str, list[object]] | None = None

    def holds(self, file: WeightFile, stamp: Stamp | None) -> bool:
        """Whether the file was right when it had this stamp."""
        with self._lock:
            return stamp is not None and self._read().get(file.path.name) == _entry(file, stamp)

    def add(self, file: WeightFile, stamp: Stamp | None) -> None:
        """Remember a file that is right, and its stamp before it was read."""
        if stamp is None:
            return
        with self._lock:
            self._found = None  # another process may have added some
            found = self._read()
            found[file.path.name] = _entry(file, stamp)
            new = self._path.with_suffix(f".{os.getpid()}-{id(self)}")
            try:
                new.parent.mkdir(parents=True, exist_ok=True)
                new.write_text(json.dumps(found))
                new.replace(self._path)
            except OSError:
                with suppress(OSError):
                    new.unlink()

    def _read(self) -> dict[str, list[object]]:
        if self._found is None:
            try:
                found = json.loads(self._path.read_bytes())
            except (OSError, ValueError):  # none, or damaged: all is compared again
                found = {}
            self._found = found if isinstance(found, dict) else {}
        return self._found


def _entry(file: WeightFile, stamp: Stamp) -> list[object]:
    return [file.sha256, *stamp]
