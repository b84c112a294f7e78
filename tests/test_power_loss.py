"""What is said to be on disk is there after a power loss: all that `os.fsync` forced, no more."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest

from qoff.checkpoint import Checkpoint, verify
from qoff.eval.perplexity.records import Records
from qoff.jobs.journal import Journal, Places
from qoff.serve.batch_store import BatchStore
from qoff.serve.files import FileStore
from qoff.train.exports import replacing
from tests.checkpoint.samples import write

_Key: TypeAlias = tuple[int, int]


class Disk:
    """A disk as POSIX promises it: of files the bytes that were forced there, of folders the names.

    Renames and deletions that no one has forced have not happened.
    """

    def __init__(self) -> None:
        self._files: dict[_Key, int] = {}  # open, so that no other one gets their numbers
        self._bytes: dict[_Key, bytes] = {}
        self._names: dict[_Key, dict[str, os.stat_result]] = {}

    def fsync(self, file: Any) -> None:
        descriptor = file if isinstance(file, int) else file.fileno()
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            with os.scandir(descriptor) as entries:
                self._names[_key(status)] = {one.name: one.stat() for one in entries}
        else:
            key = _key(status)
            if key not in self._files:
                self._files[key] = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY)
            self._bytes[key] = os.pread(self._files[key], status.st_size, 0)

    def close(self) -> None:
        for file in self._files.values():
            os.close(file)

    def after(self, folder: Path, place: Path) -> Path:
        """Make at a place what a power loss leaves of a folder."""
        shutil.rmtree(place, ignore_errors=True)
        self._make(folder.stat(), place)
        return place

    def _make(self, status: os.stat_result, place: Path) -> None:
        if not stat.S_ISDIR(status.st_mode):
            place.write_bytes(self._bytes.get(_key(status), b""))
            return
        place.mkdir()
        for name, inner in self._names.get(_key(status), {}).items():
            self._make(inner, place / name)


def _key(status: os.stat_result) -> _Key:
    return status.st_dev, status.st_ino


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    with closing(Disk()) as found:
        monkeypatch.setattr(os, "fsync", found.fsync)
        yield found


def test_answers_of_a_job(disk: Disk, tmp_path: Path) -> None:
    """And the order that they were brought into; those of an older job are gone."""
    folder, lost = tmp_path / "job", tmp_path / "lost"
    folder.mkdir()

    def opened(folder: Path, overwrite: bool = False) -> Journal:
        return Journal(Places(folder / "out", folder / "wrong"), {"a": 1}, overwrite=overwrite)

    def found() -> list[int]:
        with closing(opened(disk.after(folder, lost))) as left:
            assert (left.completed, left.failed) == (journal.completed, journal.failed)
            return [number for number in range(9) if number in left.done]

    for overwrite in (False, True):
        with closing(opened(folder, overwrite)) as journal:
            assert found() == []
            for done, number in enumerate((3, 1, 0, 2)):
                line = json.dumps({"index": number, "sample": 0, "job": journal.job}).encode()
                written = [line + b"\n"]
                if number % 2:
                    journal.write([number], written, [])
                else:
                    journal.write([number], [], [line[:-1] + b', "error": "x"}\n'])
                assert found() == sorted((3, 1, 0, 2)[: done + 1])
            journal.sort()
            found()
            lines = (lost / "out").read_text().splitlines()
            assert [json.loads(text)["index"] for text in lines] == [1, 3]


def test_files_and_batches_of_a_server(disk: Disk, tmp_path: Path) -> None:
    with closing(FileStore(tmp_path / "store", 100, 100)) as files:
        path, name = files.uploads / "x", files.new_id()
        path.write_bytes(b"content")
        files.add(path, "a", "batch", name)
        batches = BatchStore(tmp_path / "batches")
        said = batches.create(name, "/v1/completions", "24h", None)
        batches.turn(said, "in_progress")
    (tmp_path / "lost").mkdir()
    disk.after(tmp_path / "store" / "files", tmp_path / "lost" / "files")
    with closing(FileStore(tmp_path / "lost", 100, 100)) as files:
        assert files.path(name).read_bytes() == b"content"
    left = BatchStore(disk.after(tmp_path / "batches", tmp_path / "left")).all()
    assert [one["status"] for one in left] == ["in_progress"]


@pytest.mark.parametrize("there", [False, True], ids=["new", "replaced"])
def test_a_checkpoint(there: bool, disk: Disk, tmp_path: Path) -> None:
    if there:
        write(tmp_path / "models" / "model", layers=2)
    write(tmp_path / "models" / "model", layers=1, overwrite=there)
    found = disk.after(tmp_path / "models", tmp_path / "lost") / "model"
    assert verify(found).files == 2
    assert len(Checkpoint.open(found).layers) == 1


def test_what_training_has_made(disk: Disk, tmp_path: Path) -> None:
    """In folders within its folder, too, as those of several adapters."""
    for text in ("old", "new"):
        with replacing(tmp_path / "out") as beside:
            for name in ("a.safetensors", "config.json", "adapter/b.safetensors"):
                (beside / name).parent.mkdir(exist_ok=True)
                (beside / name).write_text(text)
        found = disk.after(tmp_path / "out", tmp_path / "lost")
        files = [path for path in found.rglob("*") if path.is_file()]
        assert [path.read_text() for path in files] == [text] * 3


def test_windows_that_were_scored(disk: Disk, tmp_path: Path) -> None:
    folder = tmp_path / "scores"
    folder.mkdir()
    with closing(Records(folder / "windows", {"text": "a"})) as records:
        for window in range(2):
            records.append(window, {"loss": np.arange(3.0)})
            lost = disk.after(folder, tmp_path / "lost") / "windows"
            with closing(Records(lost, {"text": "a"})) as found:
                assert found.windows == [*range(window + 1)]
