"""Batches of clients: one after another through the engine, across restarts of the server."""

from __future__ import annotations

import logging
import re
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

from qoff.api.errors import ApiError
from qoff.engine import LLM
from qoff.errors import ArgumentError, QoffError
from qoff.jobs.file import cache_says, fingerprint
from qoff.jobs.journal import Journal, Places
from qoff.jobs.lines import overview, read_lines
from qoff.jobs.requests import OpenAIReader
from qoff.jobs.runner import Counts, Runner
from qoff.schema import read_object
from qoff.settings import cache_directory

from .files import FileStore, write_json

logger = logging.getLogger("qoff.serve")
_ID = re.compile(r"batch_[0-9a-f]{32}")
_MOST = 10_000  # batches
_AGAIN_S = 5.0  # between attempts to save how a batch has ended
_ENDED = ("completed", "failed", "cancelled")
_TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")

Room = Callable[[int], int]


class Batches:
    """Batches, and the thread that runs them. name: of the model."""

    def __init__(self, files: FileStore, name: str) -> None:
        self.files, self._name = files, name
        self._folder = files.folder / "batches"
        self._folder.mkdir(mode=0o700, exist_ok=True)
        found = [read_object(p) for p in self._folder.glob("*.json") if _ID.fullmatch(p.stem)]
        found.sort(key=lambda one: (one["created_at"], one["id"]))
        self._known: dict[str, dict[str, Any]] = {one["id"]: one for one in found}
        self._changed = threading.Condition()
        self._runner: Runner | None = None
        self._running = ""  # the id of its batch
        self._stopped = False
        self._thread: threading.Thread | None = None

    def start(self, llm: LLM, room: Room, places: int, count: Callable[[int, int], None]) -> None:
        """Run batches from now on. count: hears of tokens of prompts and answers."""
        self._llm, self._room, self._places, self._count = llm, room, places, count
        self._model = fingerprint(llm.runtime.checkpoint.path)
        self._thread = threading.Thread(target=self._work, name="qoff-serve-batches")
        self._thread.start()

    def stop(self) -> None:
        """Write what is done, and run no more; what is not done goes on after the next start."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
            if self._runner is not None:
                self._runner.stop()
        if self._thread is not None:
            self._thread.join()
        self.files.close()

    def poke(self) -> None:
        """There may be more room, or less."""
        runner = self._runner
        if runner is not None:
            runner.poke()

    @property
    def in_flight(self) -> int:
        """Answers that the engine was asked for."""
        runner = self._runner
        return 0 if runner is None else runner.in_flight

    def create(
        self, file_id: str, endpoint: str, window: str, metadata: dict[str, str] | None
    ) -> dict[str, Any]:
        """Queue a batch. Raises ApiError where there is no such file."""
        if self.files.get(file_id)["purpose"] != "batch":
            raise ApiError(400, "the purpose of the file is not batch", param="input_file_id")
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
        self._save(said)
        return said

    def _make_room(self) -> None:
        """Forget the batches that were made first of those that ended; their files stay.

        Raises ApiError where too many have not ended.
        """
        with self._changed:
            ended = [one for one, said in self._known.items() if said["status"] in _ENDED]
            for batch_id in ended[: max(0, len(self._known) + 1 - _MOST)]:
                (self._folder / f"{batch_id}.json").unlink(missing_ok=True)
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
        with self._changed:
            return list(self._known.values())

    def cancel(self, batch_id: str) -> dict[str, Any]:
        """Give a batch up; what is answered of it by then is kept. Raises ApiError if it ended."""
        with self._changed:
            said = self.get(batch_id)
            if said["status"] in (*_ENDED, "finalizing"):
                raise ApiError(409, f"the batch is {said['status']}", code="batch_ended")
            if said["status"] != "cancelling":
                self._turn(said, "cancelling")
            if self._running == batch_id and self._runner is not None:
                self._runner.stop()
        return self.get(batch_id)

    def remove_file(self, file_id: str) -> None:
        """Forget a file. Raises ApiError where a batch needs it, and where there is none."""
        for one in self.all():
            needed = (one["input_file_id"], one["output_file_id"], one["error_file_id"])
            if file_id in needed and one["status"] not in _ENDED:
                raise ApiError(409, f"the batch {one['id']} needs the file", code="file_in_use")
        self.files.remove(file_id)

    def _save(self, said: dict[str, Any]) -> None:
        with self._changed:
            write_json(self._folder / f"{said['id']}.json", said)
            self._known[said["id"]] = said
            self._changed.notify_all()

    def _turn(self, said: dict[str, Any], status: str, **more: Any) -> None:
        """Have another status from now on; clients are given whole documents."""
        with self._changed:
            now = self._known[said["id"]]
            when = {f"{status}_at": now[f"{status}_at"] or int(time.time())}
            self._save({**now, "status": status, **when, **more})

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopped or self._next() is not None)
                said = self._next()
                if self._stopped or said is None:
                    return
            try:
                self._run(said)
            except (QoffError, OSError, ApiError) as error:
                self._fail(said, str(error))
            except Exception:
                logger.exception("batch failed", extra={"fields": {"batch": said["id"]}})
                self._fail(said, "internal error")

    def _next(self) -> dict[str, Any] | None:
        return next((one for one in self._known.values() if one["status"] not in _ENDED), None)

    def _fail(self, said: dict[str, Any], why: str) -> None:
        """End a batch by an error; what was answered of it is published.

        Where the disk does not take that, the batch stays the next one, to be ended a while later.
        """
        fields = {"batch": said["id"], "error": why}
        logger.error("batch failed", extra={"fields": fields})
        error = {"code": "failed", "message": why[:500], "line": None, "param": None}
        errors = self.get(said["id"])["errors"] or {"object": "list", "data": [error]}
        try:
            self._publish(said, errors)
        except OSError as reason:
            fields = {"batch": said["id"], "error": str(reason), "again_s": _AGAIN_S}
            logger.error("batch cannot be saved", extra={"fields": fields})
            with self._changed:
                now = self._known[said["id"]]
                self._known[said["id"]] = {**now, "status": "finalizing", "errors": errors}
                self._changed.wait_for(lambda: self._stopped, _AGAIN_S)

    def _run(self, said: dict[str, Any]) -> None:
        batch_id = said["id"]
        if said["status"] != "finalizing":  # then the journal may have been published
            with self.files.path(said["input_file_id"]).open("rb") as file:
                seen = overview(file)
                if not seen.lines:
                    raise ArgumentError("the file has no requests")
                file.seek(0)
                says = {
                    "model": self._model,
                    "requests": seen.sha256,
                    "name": self._name,
                    "endpoint": said["endpoint"],
                    **cache_says(self._llm.plan),
                }
                journal = Journal(self._places_of(batch_id), says)
                try:
                    self._answer(said, read_lines(file), journal, seen.lines)
                finally:
                    journal.close()
            if self._stopped:
                return
        self._publish(said, self.get(batch_id)["errors"])
        fields = {"batch": batch_id, **self.get(batch_id)["request_counts"]}
        logger.info("batch ended", extra={"fields": fields})

    def _answer(self, said: dict[str, Any], lines: Any, journal: Journal, total: int) -> None:
        """Answer what is left of a batch. Raises what ends it."""
        before = Counts()

        def noticed(counts: Counts) -> None:
            self._count(counts.prompt_tokens - before.prompt_tokens, counts.tokens - before.tokens)
            before.prompt_tokens, before.tokens = counts.prompt_tokens, counts.tokens
            with self._changed:
                self._known[said["id"]] = {**self._known[said["id"]], "request_counts": tell()}

        def tell() -> dict[str, int]:
            done = {"completed": journal.completed, "failed": journal.failed}
            return {"total": total, **done}

        reader = OpenAIReader(self._llm, self._name, journal.job, said["endpoint"])
        runner = Runner(self._llm, lines, reader, journal, self._room,
                        most=self._places, noticed=noticed)  # fmt: skip
        with self._changed:
            if self._stopped or self._known[said["id"]]["status"] == "cancelling":
                return
            self._turn(said, "in_progress", request_counts=tell())
            self._runner, self._running = runner, said["id"]
        try:
            runner.run()
        finally:
            with self._changed:
                self._runner, self._running = None, ""
                now = {**self._known[said["id"]], "request_counts": tell()}
                self._save(now)
        if runner.error is not None:
            raise runner.error

    def _places_of(self, batch_id: str) -> Places:
        return Places(self._folder / f"{batch_id}.jsonl", self._folder / f"{batch_id}.errors.jsonl")

    def _publish(self, said: dict[str, Any], errors: dict[str, Any] | None) -> None:
        """End a batch: make files of what is answered.

        The first write says all that is needed to do so again where a kill comes between: the
        files' ids and, by `errors` and `cancelling_at`, how it ends.
        """
        places = self._places_of(said["id"])
        found: dict[str, Path] = {}
        with self._changed:
            now, ids = self._known[said["id"]], {}
            for field, path in (
                ("output_file_id", places.output),
                ("error_file_id", places.errors),
            ):
                ids[field] = now[field]
                if now[field] is None and path.exists() and path.stat().st_size:
                    ids[field] = self.files.new_id()
                if ids[field] is not None:
                    found[field] = path
            self._turn(said, "finalizing", errors=errors, **ids)
        for field, path in found.items():
            name = f"{said['id']}_{field.removesuffix('_file_id')}.jsonl"
            self.files.add(path, name, "batch_output", ids[field])
        for path in (places.output, places.errors, places.header, Path(f"{places.output}.sorting")):
            with suppress(FileNotFoundError):
                path.unlink()
        ended = "cancelled" if now["cancelling_at"] else "completed"
        self._turn(said, "failed" if errors else ended)


def open_batches(
    folder: Path | None, name: str, max_file_bytes: int, max_bytes: int
) -> Batches | None:
    """The batches of a folder; None: the model's own folder, which only one server can have.

    Raises ArgumentError where another server has a folder that was given, OSError where it cannot
    be. The server goes without batches where that is so of the model's own.
    """
    place = cache_directory() / "served" / f"model-{quote(name, safe='')}"
    try:
        return Batches(FileStore(folder or place, max_file_bytes, max_bytes), name)
    except (ArgumentError, OSError) as error:
        if folder is not None:
            raise
        fields = {"error": str(error), "advice": "give --files FOLDER for files and batches"}
        logger.warning("no files", extra={"fields": fields})
        return None
