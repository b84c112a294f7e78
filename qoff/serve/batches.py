"""Batches of clients: one after another through the engine, across restarts of the server."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

from qoff.api.errors import ApiError
from qoff.engine import LLM
from qoff.errors import ArgumentError, ClosedError, QoffError
from qoff.jobs.file import adapters_say, cache_says, fingerprint
from qoff.jobs.journal import Journal, Places
from qoff.jobs.lines import overview, read_lines
from qoff.jobs.requests import OpenAIReader
from qoff.jobs.runner import Counts, Runner
from qoff.schema import read_object
from qoff.settings import cache_directory

from .batch_store import ENDED, BatchStore
from .faults import told_of_batch, told_of_line
from .files import FileStore
from .logs import logger

_AGAIN_S = 5.0  # between attempts to save how a batch has ended

Room = Callable[[int], int]


class Batches:
    """Batches, and the thread that runs them. name: of the model.

    thinking: whether it is told apart from what answers say.
    """

    def __init__(self, files: FileStore, name: str, thinking: bool = True) -> None:
        self.files, self._name, self._thinking = files, name, thinking
        self.store = BatchStore(files.folder / "batches")
        self._changed = self.store.changed
        self._runner: Runner | None = None
        self._in_hand = ""  # the id of the thread's batch
        self._stopped = False
        self._thread: threading.Thread | None = None

    def start(self, llm: LLM, room: Room, places: int, count: Callable[[int, int], None]) -> None:
        """Run batches from now on. count: hears of tokens of prompts and answers."""
        self._llm, self._room, self.most, self._count = llm, room, places, count
        self._model = fingerprint(llm.checkpoint.path)
        self._adapters = adapters_say(llm.adapter_folders)
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
        return self.store.create(file_id, endpoint, window, metadata)

    def cancel(self, batch_id: str) -> dict[str, Any]:
        """Give a batch up; what is answered of it by then is kept. Raises ApiError if it ended.

        One that waits and has no answers is cancelled at once; others are by the thread.
        """
        with self._changed:
            said = self.store.get(batch_id)
            if said["status"] in (*ENDED, "finalizing"):
                raise ApiError(409, f"the batch is {said['status']}", code="batch_ended")
            if said["status"] != "cancelling":
                self.store.turn(said, "cancelling")
            if self._in_hand != batch_id and not self._places_of(batch_id).header.exists():
                self.store.turn(said, "cancelled")
            elif self._in_hand == batch_id and self._runner is not None:
                self._runner.stop()
        return self.store.get(batch_id)

    def remove_file(self, file_id: str) -> None:
        """Forget a file. Raises ApiError where a batch needs it, and where there is none."""
        for one in self.store.all():
            needed = (one["input_file_id"], one["output_file_id"], one["error_file_id"])
            if file_id in needed and one["status"] not in ENDED:
                raise ApiError(409, f"the batch {one['id']} needs the file", code="file_in_use")
        self.files.remove(file_id)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopped or self.store.next() is not None)
                said = self.store.next()
                if self._stopped or said is None:
                    return
                self._in_hand = said["id"]
            try:
                self._run(said)
            except ClosedError:  # the server ends; batches go on after its restart
                return
            except (QoffError, OSError, ApiError) as error:
                self._fail(said, str(error), told_of_batch(error, self.store.folder))
            except Exception as error:
                logger.exception("batch failed", extra={"fields": {"batch": said["id"]}})
                self._fail(said, "internal error", told_of_batch(error, self.store.folder))
            with self._changed:
                self._in_hand = ""

    def _fail(self, said: dict[str, Any], why: str, told: str) -> None:
        """End a batch by an error; what was answered of it is published. told: to its client.

        Where the disk does not take that, the batch stays the next one, to be ended a while later.
        """
        fields = {"batch": said["id"], "error": why}
        logger.error("batch failed", extra={"fields": fields})
        error = {"code": "failed", "message": told[:500], "line": None, "param": None}
        errors = self.store.get(said["id"])["errors"] or {"object": "list", "data": [error]}
        try:
            self._publish(said, errors)
        except OSError as reason:
            fields = {"batch": said["id"], "error": str(reason), "again_s": _AGAIN_S}
            logger.error("batch cannot be saved", extra={"fields": fields})
            with self._changed:
                self.store.note(said["id"], status="finalizing", errors=errors)
                self._changed.wait_for(lambda: self._stopped, _AGAIN_S)

    def _run(self, said: dict[str, Any]) -> None:
        batch_id = said["id"]
        if said["status"] == "cancelling":
            self._take_up(batch_id)
        elif said["status"] != "finalizing":  # then the journal may have been published
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
                    "reasoning": {} if self._thinking else {"format": "none"},
                }
                if self._adapters:
                    says["adapters"] = self._adapters
                journal = Journal(self._places_of(batch_id), says, requests=seen.lines)
                try:
                    with self.files.coming() as more:
                        self._answer(said, read_lines(file), _Bounded(journal, more), seen.lines)
                finally:
                    journal.close()
            if self._stopped:
                return
        self._publish(said, self.store.get(batch_id)["errors"])
        fields = {"batch": batch_id, **self.store.get(batch_id)["request_counts"]}
        logger.info("batch ended", extra={"fields": fields})

    def _take_up(self, batch_id: str) -> None:
        """Cut what a kill has torn of a batch's answers, and know how many there are."""
        places = self._places_of(batch_id)
        if not places.header.exists() or not places.header.stat().st_size:
            return  # it had not begun
        journal = Journal(places, read_object(places.header))
        journal.close()
        counts = self.store.get(batch_id)["request_counts"]
        counts = {**counts, "completed": journal.completed, "failed": journal.failed}
        self.store.save({**self.store.get(batch_id), "request_counts": counts})

    def _answer(self, said: dict[str, Any], lines: Any, sink: _Bounded, total: int) -> None:
        """Answer what is left of a batch. Raises what ends it."""
        journal = sink.journal
        before = Counts()

        def noticed(counts: Counts) -> None:
            self._count(counts.prompt_tokens - before.prompt_tokens, counts.tokens - before.tokens)
            before.prompt_tokens, before.tokens = counts.prompt_tokens, counts.tokens
            self.store.note(said["id"], request_counts=tell())

        def tell() -> dict[str, int]:
            done = {"completed": journal.completed, "failed": journal.failed}
            return {"total": total, **done}

        form = self._llm, self._name, journal.job, said["endpoint"], self._thinking
        reader = OpenAIReader(*form, told=told_of_line)
        runner = Runner(self._llm, lines, reader, sink, self._room,
                        most=self.most, noticed=noticed)  # fmt: skip
        with self._changed:
            if self._stopped or self.store.get(said["id"])["status"] == "cancelling":
                return
            self.store.turn(said, "in_progress", request_counts=tell())
            self._runner = runner
        try:
            runner.run()
        finally:
            with self._changed:
                self._runner = None
                self.store.save({**self.store.get(said["id"]), "request_counts": tell()})
        if runner.error is not None:
            raise runner.error

    def _places_of(self, batch_id: str) -> Places:
        return Places(
            self.store.folder / f"{batch_id}.jsonl", self.store.folder / f"{batch_id}.errors.jsonl"
        )

    def _publish(self, said: dict[str, Any], errors: dict[str, Any] | None) -> None:
        """End a batch: make files of what is answered.

        The first write says all that is needed to do so again where a kill comes between: the
        files' ids and, by `errors` and `cancelling_at`, how it ends.
        """
        places = self._places_of(said["id"])
        found: dict[str, Path] = {}
        with self._changed:
            now, ids = self.store.get(said["id"]), {}
            for field, path in (
                ("output_file_id", places.output),
                ("error_file_id", places.errors),
            ):
                ids[field] = now[field]
                if now[field] is None and path.exists() and path.stat().st_size:
                    ids[field] = self.files.new_id()
                if ids[field] is not None:
                    found[field] = path
            self.store.turn(said, "finalizing", errors=errors, **ids)
        for field, path in found.items():
            name = f"{said['id']}_{field.removesuffix('_file_id')}.jsonl"
            self.files.add(path, name, "batch_output", ids[field])
        for path in (places.output, places.errors, places.header, Path(f"{places.output}.sorting")):
            with suppress(FileNotFoundError):
                path.unlink()
        ended = "cancelled" if now["cancelling_at"] else "completed"
        self.store.turn(said, "failed" if errors else ended)


class _Bounded:
    """A journal that grows while there is room for files. keep: keeps room, or raises ApiError."""

    def __init__(self, journal: Journal, keep: Callable[[int], None]) -> None:
        self.journal, self.done, self._keep = journal, journal.done, keep
        places = (journal.places.output, journal.places.errors)
        keep(sum(path.stat().st_size for path in places if path.exists()))

    def write(self, numbers: list[int], output: list[bytes], errors: list[bytes]) -> None:
        self._keep(sum(map(len, output)) + sum(map(len, errors)))
        self.journal.write(numbers, output, errors)


def open_batches(
    folder: Path | None, name: str, max_file_bytes: int, max_bytes: int, thinking: bool = True
) -> Batches | None:
    """The batches of a folder; None: the model's own folder, which only one server can have.

    thinking: whether it is told apart from what answers say.

    Raises ArgumentError where another server has a folder that was given, OSError where it cannot
    be. The server goes without batches where that is so of the model's own.
    """
    place = cache_directory() / "served" / f"model-{quote(name, safe='')}"
    try:
        return Batches(FileStore(folder or place, max_file_bytes, max_bytes), name, thinking)
    except (ArgumentError, OSError) as error:
        if folder is not None:
            if isinstance(error, ArgumentError):
                raise ArgumentError(f"{error}; give another --files folder") from error
            raise
        fields = {"error": str(error), "advice": "give --files FOLDER for files and batches"}
        logger.warning("no files", extra={"fields": fields})
        return None
