"""The unmodified `openai` client uploads files; forms that are none, and files without end."""

from __future__ import annotations

import asyncio
import errno
import io
import os
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI
from starlette.requests import Request

from qoff.api.errors import ApiError
from qoff.serve.files import FileStore
from qoff.serve.forms import UploadForm

from .conftest import Running


def test_files_come_back_as_they_were(client: OpenAI, served: Running) -> None:
    data = bytes(range(256)) * 100
    made = client.files.create(file=("any.bin", io.BytesIO(data)), purpose="user_data")
    assert (made.bytes, made.filename, made.purpose) == (len(data), "any.bin", "user_data")
    assert client.files.retrieve(made.id) == made
    assert client.files.content(made.id).content == data
    others = [client.files.create(file=b"x", purpose="batch").id for _ in range(3)]
    assert [one.id for one in client.files.list(limit=2)][:4] == [*others[::-1], made.id]
    assert [one.id for one in client.files.list(order="asc")][-4:] == [made.id, *others]
    status, found, _ = served.ask("/v1/files?order=x")
    assert (status, found["error"]["message"]) == (400, "order: Input should be 'asc' or 'desc'")
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
        (
            [(FILE, b"x"), (PURPOSE, b"batch"), ('name="expires_after[anchor]"', b"created_at")],
            400,
            "'expires_after[anchor]' is not supported",
        ),
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


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="no device that is always full")
@pytest.mark.parametrize("nbytes", [100, 9000])
def test_a_full_disk_is_told_and_nothing_is_left_there(tmp_path: Path, nbytes: int) -> None:
    """However much of the file waits to be written."""
    data, headers = form((FILE, b"x" * nbytes), (PURPOSE, b"batch"))

    async def receive() -> dict[str, Any]:
        nonlocal data
        piece, data = data[:1000], data[1000:]
        return {"type": "http.request", "body": piece, "more_body": bool(data)}

    async def upload() -> None:
        request = Request({"type": "http", "headers": []}, receive)
        await coming.read(request, 10, lambda _: None)

    coming = UploadForm(headers["content-type"], tmp_path, 10_000)
    coming._file.close()
    with Path("/dev/full").open("wb") as coming._file:
        with pytest.raises(ApiError, match="disk of this server is full") as refused:
            asyncio.run(upload())
        coming.close()
    assert refused.value.status == 507
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("at", range(4))
def test_a_disk_that_is_full_when_a_file_has_come_is_told(
    served: Running, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """At each write to the disk after which it is a file of the server."""
    assert served.engine.batches is not None
    store, calls, sync = served.engine.batches.files, count(), os.fsync

    def fsync(file: int) -> None:
        if next(calls) == at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(file)

    before = store.all(), sorted(store.folder.rglob("*"))
    monkeypatch.setattr("os.fsync", fsync)
    status, said, *_ = served.ask("/v1/files", *form((FILE, b"x"), (PURPOSE, b"batch")))
    assert (status, said["error"]["code"], next(calls)) == (507, "disk_full", at + 1)
    assert (store.all(), sorted(store.folder.rglob("*"))) == before


def test_a_full_disk_takes_neither_a_batch_nor_a_new_file(
    client: OpenAI, served: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert served.engine.batches is not None
    store = served.engine.batches.store
    made = client.files.create(file=b"x", purpose="batch").id
    asked = {"input_file_id": made, "endpoint": "/v1/completions", "completion_window": "24h"}

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = store.all(), sorted(store.folder.rglob("*"))
    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", full)
        assert served.ask("/v1/batches", asked)[0] == 507
    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", full)
        assert served.ask("/v1/files", *form((FILE, b"x"), (PURPOSE, b"batch")))[0] == 507
    assert (store.all(), sorted(store.folder.rglob("*"))) == before
    client.files.delete(made)


def test_what_a_full_disk_did_not_take_is_added_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answers of a batch, whose file stays as it was meanwhile."""

    def full(folder: Path) -> None:
        if folder == store.folder / "files" and (folder / name).exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    store, path = FileStore(tmp_path / "store", 100, 100), tmp_path / "answers"
    name = store.new_id()
    path.write_bytes(b"answers")
    with monkeypatch.context() as patched:
        patched.setattr("qoff.serve.files.sync_directory", full)
        with pytest.raises(OSError, match="No space"):
            store.add(path, "a", "batch_output", name)
    assert (store.all(), path.read_bytes()) == ([], b"answers")
    store.add(path, "a", "batch_output", name)
    assert store.path(name).read_bytes() == b"answers"
    store.close()


def test_what_a_kill_left_is_removed_at_the_next_start(tmp_path: Path) -> None:
    """Uploads that were cut off, and what is said of a file or the file without the other."""
    with closing(FileStore(tmp_path, 100, 100)) as store:
        (store.uploads / "x").write_bytes(b"content")
        name = store.new_id()
        store.add(store.uploads / "x", "a", "batch", name)
        before = sorted(tmp_path.rglob("*"))
        for left in ("uploads/y", f"files/{store.new_id()}", f"files/{store.new_id()}.json"):
            (tmp_path / left).write_bytes(b"{}")
        (tmp_path / "files" / f"{name}.new").write_bytes(b"{")
    with closing(FileStore(tmp_path, 100, 100)) as store:
        assert sorted(tmp_path.rglob("*")) == before
        assert [one["id"] for one in store.all()] == [name]
