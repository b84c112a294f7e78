"""The unmodified `openai` client uploads files, and has batches of them answered."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI
from starlette.requests import Request

from qoff.api.errors import ApiError
from qoff.engine import SamplingParams
from qoff.errors import ArgumentError
from qoff.serve.batches import Batches, open_batches
from qoff.serve.files import FileStore
from qoff.serve.forms import UploadForm
from tests.adapters import save_adapter

from .conftest import MODEL, OPTIONS, Running, running

CHATS = "/v1/chat/completions"


def line(number: int, tokens: int = 4, content: str = "Hi", **more: Any) -> str:
    body = {
        "messages": [{"role": "user", "content": f"{content} {number}"}],
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        **more,
    }
    return json.dumps({"custom_id": f"id {number}", "method": "POST", "url": CHATS, "body": body})


def batch_of(client: OpenAI, *lines: str, name: str = "in.jsonl") -> Any:
    file = client.files.create(file=(name, "\n".join(lines).encode()), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint=CHATS, completion_window="24h", metadata={"a": "b"}
    )


def ended(client: OpenAI, batch_id: str, *statuses: str) -> Any:
    end = time.monotonic() + 20
    while (found := client.batches.retrieve(batch_id)).status not in (statuses or ("completed",)):
        assert time.monotonic() < end, found
        time.sleep(0.01)
    return found


def read(client: OpenAI, file_id: str) -> dict[str, Any]:
    lines = client.files.content(file_id).text.splitlines()
    return {one["custom_id"]: one for one in map(json.loads, lines)}


def test_files_come_back_as_they_were(client: OpenAI, served: Running) -> None:
    data = bytes(range(256)) * 100
    made = client.files.create(file=("any.bin", io.BytesIO(data)), purpose="user_data")
    assert (made.bytes, made.filename, made.purpose) == (len(data), "any.bin", "user_data")
    assert client.files.retrieve(made.id) == made
    assert client.files.content(made.id).content == data
    others = [client.files.create(file=b"x", purpose="batch").id for _ in range(3)]
    assert [one.id for one in client.files.list(limit=2)][:4] == [*others[::-1], made.id]
    assert made.id not in [one.id for one in client.files.list(purpose="batch")]
    for file_id in [made.id, *others]:
        assert client.files.delete(file_id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(made.id)


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "/etc/passwd", "a\\..\\b", "x" * 3000, "\u202e\x00\n", "lock"]
)
def test_tricks_in_names_are_harmless(client: OpenAI, served: Running, name: str) -> None:
    assert served.engine.batches is not None
    folder = served.engine.batches.files.folder
    made = client.files.create(file=(name, b"data"), purpose="batch")
    places = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert {f"files/{made.id}", f"files/{made.id}.json"} <= places
    assert len(made.filename) <= 255
    client.files.delete(made.id)
    for wrong in (f"..%2ffiles%2f{made.id}", "..", "%2e%2e%2flock", made.id + ".json"):
        assert served.ask(f"/v1/files/{wrong}/content")[0] == 404
        assert served.ask(f"/v1/batches/{wrong}")[0] == 404


def form(*parts: tuple[str, bytes], boundary: str = "x") -> tuple[bytes, dict[str, str]]:
    found = b"".join(
        f"--{boundary}\r\nContent-Disposition: form-data; {head}\r\n\r\n".encode() + data + b"\r\n"
        for head, data in parts
    )
    kind = f"multipart/form-data; boundary={boundary}"
    return found + f"--{boundary}--\r\n".encode(), {"content-type": kind}


FILE, PURPOSE = 'name="file"; filename="f"', 'name="purpose"'


@pytest.mark.parametrize(
    ("parts", "status", "message"),
    [
        ([(FILE, b"x" * (2 << 20)), (PURPOSE, b"batch")], 413, "1048576 bytes"),
        ([(FILE, b""), (PURPOSE, b"batch")], 400, "empty"),
        ([(FILE, b"x"), (PURPOSE, b"theft")], 400, "purpose"),
        ([(PURPOSE, b"batch")], 400, "has to have a file"),
        ([(FILE, b"x"), (FILE, b"y"), (PURPOSE, b"batch")], 400, "one file"),
        ([(FILE, b"x"), (PURPOSE, b"x" * 9999)], 400, "form is wrong"),
        ([], 400, "has to have a file"),
        ([(PURPOSE, b"batch")] * 20, 400, "parts"),
    ],
)
def test_wrong_forms_are_refused(
    served: Running, parts: list[tuple[str, bytes]], status: int, message: str
) -> None:
    assert served.engine.batches is not None
    data, headers = form(*parts)
    found = served.ask("/v1/files", data, headers)
    assert found[0] == status
    assert message in found[1]["error"]["message"]
    assert list(served.engine.batches.files.uploads.iterdir()) == []


def test_bodies_that_are_no_form_are_refused(served: Running) -> None:
    for kind in ("", "text/plain", "multipart/form-data"):
        assert served.ask("/v1/files", b"data", {"content-type": kind})[0] == 400
    data, headers = form((FILE, b"half of the data"), (PURPOSE, b"batch"))
    assert served.ask("/v1/files", b"no form", headers)[0] == 400
    assert served.ask("/v1/files", data[:90], headers)[0] == 400  # cut off
    assert served.ask("/v1/files", *form(boundary="x" * 300))[0] == 400
    assert served.engine.batches is not None
    assert list(served.engine.batches.files.uploads.iterdir()) == []
    assert served.ask("/v1/files?limit=many")[0] == 400
    assert served.ask("/v1/batches", {"input_file_id": 1})[0] == 400


def test_the_files_of_a_server_are_bounded(client: OpenAI) -> None:
    made = [client.files.create(file=bytes(1 << 20), purpose="vision").id for _ in range(2)]
    made.append(client.files.create(file=bytes(3 << 18), purpose="vision").id)
    with pytest.raises(openai.APIStatusError) as error:
        client.files.create(file=bytes(3 << 18), purpose="vision")
    assert error.value.status_code == 413
    for one in made:
        client.files.delete(one)


def test_a_batch_is_answered(client: OpenAI, served: Running) -> None:
    lines = [*(line(i) for i in range(9)), "{", line(10, content="x" * 300)]
    made = batch_of(client, *lines)
    assert (made.object, made.metadata, made.errors) == ("batch", {"a": "b"}, None)
    found = ended(client, made.id)
    assert found.request_counts is not None
    assert found.request_counts.to_dict() == {"total": 11, "completed": 9, "failed": 2}
    assert found.created_at <= found.in_progress_at <= found.finalizing_at <= found.completed_at
    answers = read(client, found.output_file_id)
    assert sorted(answers) == [f"id {i}" for i in range(9)]
    assert served.engine.llm is not None
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    (wanted,) = served.engine.llm.chat([{"role": "user", "content": "Hi 3"}], params)
    body = answers["id 3"]["response"]["body"]
    assert body["choices"][0]["message"]["content"] == wanted.text
    assert body["model"] == MODEL
    errors = client.files.content(found.error_file_id).text.splitlines()
    assert {json.loads(one)["line"] for one in errors} == {10, 11}
    assert client.batches.list(limit=1).data[0].id == made.id
    assert client.files.retrieve(found.output_file_id).purpose == "batch_output"


def test_batches_that_cannot_be(client: OpenAI) -> None:
    wrong = client.files.create(file=b"{}", purpose="user_data")
    for file_id in (wrong.id, "file-none"):
        with pytest.raises(openai.APIStatusError):
            client.batches.create(input_file_id=file_id, endpoint=CHATS, completion_window="24h")
    with pytest.raises(openai.NotFoundError):
        client.batches.cancel("batch_none")
    found = ended(client, batch_of(client, "\n\n").id, "failed")
    assert "no requests" in found.errors.data[0].message
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(found.id)


def test_a_cancelled_batch_keeps_what_is_answered(client: OpenAI, served: Running) -> None:
    with served.slowed():
        made = batch_of(client, line(0, 1), *(line(i, 150) for i in range(1, 30)))
        ended(client, made.id, "in_progress")
        with pytest.raises(openai.ConflictError):
            client.files.delete(made.input_file_id)
        time.sleep(0.3)
        assert client.batches.cancel(made.id).status in ("cancelling", "cancelled")
    found = ended(client, made.id, "cancelled")
    assert list(read(client, found.output_file_id)) == ["id 0"]
    assert found.request_counts.to_dict() == {"total": 30, "completed": 1, "failed": 0}


def test_requests_go_before_batches(client: OpenAI, served: Running) -> None:
    """Places and queue are full of a batch; requests are answered within few rounds."""
    llm = served.engine.llm
    assert llm is not None
    with served.slowed():
        made = batch_of(client, *(line(i, 150) for i in range(20)))
        end = time.monotonic() + 5
        while llm.waiting < 4:
            assert time.monotonic() < end
        rounds, threads = llm.rounds[-1].number, list[threading.Thread]()
        for _ in range(4):
            options: Any = {"model": MODEL, "prompt": "abc", "max_tokens": 3}
            threads.append(threading.Thread(target=client.completions.create, kwargs=options))
            threads[-1].start()
        for thread in threads:
            thread.join()
        assert llm.rounds[-1].number - rounds < 30
        client.batches.cancel(made.id)
    ended(client, made.id, "cancelled")


def test_a_batch_goes_on_after_a_restart(checkpoint: Path, tmp_path: Path) -> None:
    options = replace(OPTIONS, shutdown_timeout_s=0.2)
    with running(checkpoint, options, files=tmp_path) as served, served.client() as client:
        assert served.engine.batches is not None
        made = slowly_begun(client, served)
        served.engine.batches.stop()
    with running(checkpoint, options, files=tmp_path) as served, served.client() as client:
        found = ended(client, made.id)
        answers = read(client, found.output_file_id)
        assert sorted(answers) == sorted(f"id {i}" for i in range(12))
        assert len(client.files.content(found.output_file_id).text.splitlines()) == 12
        with pytest.raises(ArgumentError, match="another server"):
            open_batches(tmp_path, MODEL, 1, 1)
        assert [path.name for path in (tmp_path / "batches").iterdir()] == [f"{made.id}.json"]


def test_a_batch_does_not_go_on_with_another_adapter(checkpoint: Path, tmp_path: Path) -> None:
    for name, alpha in (("a", 16), ("b", 8)):
        save_adapter(checkpoint, tmp_path / name, lora_alpha=alpha)
    options = replace(OPTIONS, shutdown_timeout_s=0.2)
    files = tmp_path / "files"

    def opened(name: str) -> Any:
        adapters = {"sql": tmp_path / name}
        return running(checkpoint, options, files=files, adapters=adapters, device="cpu")

    with opened("a") as served, served.client() as client:
        assert served.engine.batches is not None
        made = slowly_begun(client, served)
        served.engine.batches.stop()
    with opened("b") as served, served.client() as client:
        found = ended(client, made.id, "failed")
        assert "adapters sql was" in found.errors.data[0].message


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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch ends when there is room again, by its error and with its answers."""
    monkeypatch.setattr("qoff.serve.batches._AGAIN_S", 0.01)
    batches, said = unended(tmp_path, status="in_progress")
    thread = threading.Thread(target=batches._work, daemon=True)
    with pytest.MonkeyPatch.context() as full:
        ends_at(full, 0, OSError(errno.ENOSPC, "the disk is full"))
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
    assert "the disk is full" in found["errors"]["data"][0]["message"]
    assert batches.files.path(found["output_file_id"]).read_bytes() == b"answer"


def test_room_is_kept_for_what_has_come(tmp_path: Path) -> None:
    store = FileStore(tmp_path, 100, 100)
    with store.coming() as one, store.coming() as other:
        one(10)
        other(90)
        with pytest.raises(ApiError, match="no more files"):
            one(1)
    with store.coming() as one:
        one(100)
    store.close()


def test_an_upload_has_a_time_limit_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However little there is between two pieces of it."""
    data, headers = form((FILE, b"x" * 200), (PURPOSE, b"batch"))

    async def receive() -> dict[str, Any]:
        nonlocal data
        await asyncio.sleep(0.01)
        piece, data = data[:1], data[1:]
        return {"type": "http.request", "body": piece, "more_body": bool(data)}

    async def upload() -> None:
        request = Request({"type": "http", "headers": []}, receive)
        await UploadForm(headers["content-type"], tmp_path, 1000).read(request, 0.1, lambda _: None)

    monkeypatch.setattr("qoff.serve.forms._LEAST", 1e6)
    with pytest.raises(ApiError, match="in time"):
        asyncio.run(upload())


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


def test_answers_take_no_more_room_than_files_may(checkpoint: Path, tmp_path: Path) -> None:
    with running(checkpoint, files=tmp_path) as served, served.client() as client:
        assert served.engine.batches is not None
        files = served.engine.batches.files
        lines = "\n".join(line(i) for i in range(8)).encode()
        file = client.files.create(file=("in.jsonl", lines), purpose="batch")
        files._max_bytes = len(lines) + 1000
        made = client.batches.create(input_file_id=file.id, endpoint=CHATS, completion_window="24h")
        found = ended(client, made.id, "failed")
        assert "keeps no more files" in found.errors.data[0].message
        assert sum(one["bytes"] for one in files.all()) <= files._max_bytes


def slowly_begun(client: OpenAI, served: Running) -> Any:
    """A batch of twelve requests, some of which are answered."""
    with served.slowed():
        made = batch_of(client, line(0, 1), *(line(i, 40) for i in range(1, 12)))
        end = time.monotonic() + 10
        while client.batches.retrieve(made.id).request_counts.completed < 1:  # type: ignore[union-attr]
            assert time.monotonic() < end
            time.sleep(0.02)
    return made
