"""A batch ends once, with its answers, whatever happens while they are published."""

from __future__ import annotations

import errno
import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from qoff.api.errors import ApiError
from qoff.jobs.journal import Journal
from qoff.serve.batches import Batches
from qoff.serve.files import FileStore

from .conftest import MODEL
from .test_batches import CHATS


def test_a_batch_that_just_begins_is_cancelled_by_its_thread(tmp_path: Path) -> None:
    batches, said = unended(tmp_path, status="validating")
    batches._in_hand = said["id"]
    assert batches.cancel(said["id"])["status"] == "cancelling"
    batches._run(batches.store.get(said["id"]))
    assert batches.store.get(said["id"])["status"] == "cancelled"
    batches.stop()


def test_a_cancelled_batch_of_before_goes_first_and_reads_no_requests(tmp_path: Path) -> None:
    """Of its answers, all are kept that were written as a whole."""
    batches, first = unended(tmp_path, status="validating")
    said = batches.create(first["input_file_id"], CHATS, "24h", None)
    places = batches._places_of(said["id"])
    journal = Journal(places, {"model": "tiny"})
    answer = json.dumps({"id": f"batch_req_{journal.job}_3"}).encode() + b"\n"
    journal.write([3], [answer], [])
    journal.close()
    with places.output.open("ab") as file:
        file.write(b'{"id": "batch_')
    batches.store.turn(
        said, "in_progress", request_counts={"total": 9, "completed": 0, "failed": 0}
    )
    batches.files.path(first["input_file_id"]).unlink()
    assert batches.store.next() == first
    assert batches.cancel(said["id"])["status"] == "cancelling"
    found = batches.store.next()
    assert found is not None
    batches._run(found)
    found = batches.store.get(said["id"])
    assert (found["status"], found["error_file_id"]) == ("cancelled", None)
    assert found["request_counts"] == {"total": 9, "completed": 1, "failed": 0}
    assert batches.files.path(found["output_file_id"]).read_bytes() == answer
    assert batches.store.next() == first
    batches.stop()


class Killed(BaseException):
    """The process ends here."""


def ends_at(monkeypatch: pytest.MonkeyPatch, nth: int, error: BaseException) -> None:
    """Have the call of number `nth`, from 0, on what changes the disk fail, and all after it."""
    calls = count()

    def failing(works: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            if next(calls) >= nth:
                raise error
            return works(*args, **more)

        return call

    for name in ("rename", "unlink"):
        monkeypatch.setattr(Path, name, failing(getattr(Path, name)))


def unended(folder: Path, **more: Any) -> tuple[Batches, dict[str, Any]]:
    """A batch with an answer and an error, none of which is published."""
    batches = Batches(FileStore(folder, 1 << 20, 3 << 20), MODEL)
    (batches.files.uploads / "in").write_bytes(b"requests")
    file = batches.files.add(batches.files.uploads / "in", "in", "batch", batches.files.new_id())
    said = {**batches.create(file["id"], CHATS, "24h", None), **more}
    batches.store.save(said)
    places = batches._places_of(said["id"])
    places.output.write_bytes(b"answer")
    places.errors.write_bytes(b"error")
    return batches, said


ERRORS = {"object": "list", "data": [{"code": "failed", "message": "a fault"}]}


@pytest.mark.parametrize("nth", range(9))
@pytest.mark.parametrize(
    ("errors", "cancelling_at", "status"),
    [(None, None, "completed"), (None, 1, "cancelled"), (ERRORS, None, "failed")],
)
def test_a_kill_while_answers_are_published_loses_none(
    errors: Any, cancelling_at: int | None, status: str, nth: int, tmp_path: Path
) -> None:
    """Nor does it change how the batch ends; nothing is left beside the files."""
    before = "cancelling" if cancelling_at else "in_progress"
    batches, said = unended(tmp_path, status=before, cancelling_at=cancelling_at)
    with pytest.MonkeyPatch.context() as monkeypatch:
        ends_at(monkeypatch, nth, Killed())
        with suppress(Killed):
            batches._publish(said, errors)
    batches.files.close()
    batches = Batches(FileStore(tmp_path, 1 << 20, 3 << 20), MODEL)
    now = batches.store.get(said["id"])
    if now["status"] == "finalizing":
        batches._run(now)
    elif now["status"] == before:  # killed before it was to end
        batches._publish(now, errors)
    found = batches.store.get(said["id"])
    assert (found["status"], found["errors"]) == (status, errors)
    data = [batches.files.path(found[f"{one}_file_id"]).read_bytes() for one in ("output", "error")]
    assert data == [b"answer", b"error"]
    batches.files.close()
    assert [path.stem for path in (tmp_path / "batches").iterdir()] == [said["id"]]
    assert len(list((tmp_path / "files").iterdir())) == 6


def test_a_full_disk_does_not_end_the_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The batch ends when there is room again, by its error and with its answers.

    The log says which error, with the file that it names.
    """
    monkeypatch.setattr("qoff.serve.batches._AGAIN_S", 0.01)
    batches, said = unended(tmp_path, status="in_progress")
    thread = threading.Thread(target=batches._work, daemon=True)
    with pytest.MonkeyPatch.context() as full:
        ends_at(full, 0, OSError(errno.ENOSPC, "the disk is full", "/files/in"))
        full.setattr(batches, "_run", lambda _: batches._publish(said, None))
        thread.start()
        end = time.monotonic() + 10
        while batches.store.get(said["id"])["errors"] is None and time.monotonic() < end:
            time.sleep(0.005)
        with pytest.raises(ApiError, match="needs the file"):
            batches.remove_file(said["input_file_id"])
    while batches.store.get(said["id"])["status"] != "failed":
        assert time.monotonic() < end
        time.sleep(0.005)
    batches._thread = thread
    batches.stop()
    found = batches.store.get(said["id"])
    assert "its log says why" in found["errors"]["data"][0]["message"]
    logged: list[Any] = [one for one in caplog.records if one.getMessage() == "batch failed"]
    fields = logged[0].fields
    assert (fields["batch"], "is full: '/files/in'" in fields["error"]) == (said["id"], True)
    assert batches.files.path(found["output_file_id"]).read_bytes() == b"answer"


def test_the_oldest_ended_batch_makes_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qoff.serve.batch_store._MOST", 2)
    batches, first = unended(tmp_path, status="completed")
    second = batches.create(first["input_file_id"], CHATS, "24h", None)
    third = batches.create(first["input_file_id"], CHATS, "24h", None)
    assert [one["id"] for one in batches.store.all()] == [second["id"], third["id"]]
    assert not (tmp_path / "batches" / f"{first['id']}.json").exists()
    with pytest.raises(ApiError, match="have not ended"):
        batches.create(first["input_file_id"], CHATS, "24h", None)
    batches.stop()
