"""What is known of batches: a file of JSON for each, across restarts of the server."""

from __future__ import annotations

import re
import secrets
import threading
import time
from pathlib import Path
from typing import Any

from qoff.api.errors import ApiError
from qoff.schema import read_object

from .files import write_json

_ID = re.compile(r"batch_[0-9a-f]{32}")
_MOST = 10_000  # batches
ENDED = ("completed", "failed", "cancelled")
_TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")


class BatchStore:
    """Batches in a folder that no other process uses. changed: held where one is changed."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.changed = folder, threading.Condition()
        folder.mkdir(mode=0o700, exist_ok=True)
        found = [read_object(p) for p in folder.glob("*.json") if _ID.fullmatch(p.stem)]
        found.sort(key=lambda one: (one["created_at"], one["id"]))
        self._known: dict[str, dict[str, Any]] = {one["id"]: one for one in found}

    def create(
        self, file_id: str, endpoint: str, window: str, metadata: dict[str, str] | None
    ) -> dict[str, Any]:
        """Add a batch, and what is to be known of it."""
        self._make_room()
        said = {
            "id": f"batch_{secrets.token_hex(16)}",
            "object": "batch",
            "endpoint": endpoint,
            "errors": None,
            "input_file_id": file_id,
            "completion_window": window,
            "status": "validating",
            "output_file_id": None,
            "error_file_id": None,
            "created_at": int(time.time()),
            "expires_at": None,
            **{f"{status}_at": None for status in _TIMES},
            "request_counts": {"total": 0, "completed": 0, "failed": 0},
            "metadata": metadata,
        }
        self.save(said)
        return said

    def _make_room(self) -> None:
        """Forget the batches that were made first of those that ended; their files stay.

        Raises ApiError where too many have not ended.
        """
        with self.changed:
            ended = [one for one, said in self._known.items() if said["status"] in ENDED]
            for batch_id in ended[: max(0, len(self._known) + 1 - _MOST)]:
                (self.folder / f"{batch_id}.json").unlink(missing_ok=True)
                del self._known[batch_id]
            if len(self._known) >= _MOST:
                raise ApiError(429, f"{_MOST} batches have not ended", code="too_many_batches")

    def get(self, batch_id: str) -> dict[str, Any]:
        """A batch as it is now. Raises ApiError where there is none."""
        found = self._known.get(batch_id)
        if found is None:
            raise ApiError(404, f"there is no batch {batch_id[:100]!r}", code="batch_not_found")
        return found

    def all(self) -> list[dict[str, Any]]:
        """All batches, the oldest first."""
        with self.changed:
            return list(self._known.values())

    def next(self) -> dict[str, Any] | None:
        """The oldest batch that has not ended; first of all one that is only to be given up."""
        open_ = [one for one in self._known.values() if one["status"] not in ENDED]
        return min(open_, key=lambda one: one["status"] != "cancelling", default=None)

    def note(self, batch_id: str, **more: Any) -> None:
        """Know more of a batch, until a restart."""
        with self.changed:
            self._known[batch_id] = {**self._known[batch_id], **more}

    def save(self, said: dict[str, Any]) -> None:
        """Keep what is known of a batch, on disk."""
        with self.changed:
            write_json(self.folder / f"{said['id']}.json", said)
            self._known[said["id"]] = said
            self.changed.notify_all()

    def turn(self, said: dict[str, Any], status: str, **more: Any) -> None:
        """Have another status from now on; clients are given whole documents."""
        with self.changed:
            now = self._known[said["id"]]
            when = {f"{status}_at": now[f"{status}_at"] or int(time.time())}
            self.save({**now, "status": status, **when, **more})
