"""A checkpoint is there completely or not at all."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import pytest
import torch

from qoff.checkpoint import Checkpoint, CheckpointWriter, verify, writer
from qoff.checkpoint.layout import COPIED, INDEX_FILE, KV_SENSITIVITY_FILE
from qoff.errors import ConversionError, FormatError
from tests.checkpoint.samples import layer_weights, outer_weights, write

ROOT = Path(__file__).parents[2]
WRITING = """
import sys, time
from pathlib import Path
from qoff.checkpoint import CheckpointWriter
from tests.checkpoint.samples import layer_weights
with CheckpointWriter(Path(sys.argv[1]), overwrite=True) as writer:
    writer.write_layer(0, layer_weights(0))
    print("writing", flush=True)
    time.sleep(60)
"""
Usage = namedtuple("Usage", "free")


class FullDisk:
    """A file that takes `room` bytes more, then there is no space left."""

    def __init__(self, file: IO[Any], room: list[int]) -> None:
        self._file, self._room = file, room

    def write(self, data: Any) -> int:
        self._room[0] -= len(data)
        if self._room[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> FullDisk:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes that the disk still takes."""
    left, plain = [1 << 60], Path.open

    def limited(path: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        file = plain(path, mode, *args, **kwargs)
        return FullDisk(file, left) if mode == "xb" else file

    monkeypatch.setattr(Path, "open", limited)
    return left


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def content(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit, MemoryError])
def test_an_exception_leaves_nothing(tmp_path: Path, kind: type[BaseException]) -> None:
    seen: list[str] = []

    def convert() -> None:
        with CheckpointWriter(tmp_path / "model") as writer:
            writer.write_layer(0, layer_weights(0))
            seen.extend(names(tmp_path))
            raise kind

    with pytest.raises(kind):
        convert()
    assert [n.startswith(".model.qoff-") for n in seen] == [True]
    assert names(tmp_path) == []


def test_leaving_without_finish_leaves_nothing(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path / "model") as writer:
        writer.write_layer(0, layer_weights(0))
    assert names(tmp_path) == []


def test_a_full_disk_at_any_byte_leaves_nothing(tmp_path: Path, room: list[int]) -> None:
    write(tmp_path / "model")
    whole = (1 << 60) - room[0]
    for taken in [0, 1, 4096, *range(5000, whole, whole // 12), whole - 1]:
        room[0] = taken
        with pytest.raises(ConversionError, match=r"second: the disk is full.*free.*elsewhere"):
            write(tmp_path / "second")
        assert names(tmp_path) == ["model"]
    room[0] = whole
    write(tmp_path / "second")
    assert verify(tmp_path / "second").files == 4


def test_a_full_disk_keeps_what_was_to_be_replaced(tmp_path: Path, room: list[int]) -> None:
    before = content(write(tmp_path / "model"))
    room[0] = 10_000
    with pytest.raises(ConversionError, match="full"):
        write(tmp_path / "model", layers=5, overwrite=True)
    assert names(tmp_path) == ["model"]
    assert content(tmp_path / "model") == before


def test_too_little_space_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer.shutil, "disk_usage", lambda _: Usage(3 << 20))
    with (
        pytest.raises(ConversionError, match=r"model.*5\.0 MiB needed, 3\.0 MiB free"),
        CheckpointWriter(tmp_path / "model", expected_bytes=5 << 20),
    ):
        pass
    assert names(tmp_path) == []


def test_another_write_error_names_the_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(writer.os, "fsync", broken)
    why = r"model: cannot be written \([^\[]*Input/output error"  # without "[Errno 5]"
    with pytest.raises(ConversionError, match=why):
        write(tmp_path / "model")
    assert names(tmp_path) == []


def test_a_place_that_is_taken_is_refused(tmp_path: Path) -> None:
    before = content(write(tmp_path / "model"))
    with pytest.raises(ConversionError, match=r"exists already; .*\(--overwrite\)"):
        write(tmp_path / "model")
    assert names(tmp_path) == ["model"]
    assert content(tmp_path / "model") == before


def test_a_place_taken_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path / "model") as writer:
        writer.write_outer(outer_weights())
        write(tmp_path / "model")
        with pytest.raises(ConversionError, match="exists already"):
            writer.finish({})
    assert names(tmp_path) == ["model"]


def test_overwriting_replaces_at_the_end(tmp_path: Path) -> None:
    before = content(write(tmp_path / "model", layers=2))
    with CheckpointWriter(tmp_path / "model", overwrite=True) as writer:
        writer.write_layer(0, layer_weights(0))
        writer.write_outer(outer_weights())
        assert content(tmp_path / "model") == before
        writer.finish({"num_hidden_layers": 1})
    assert names(tmp_path) == ["model"]
    assert len(Checkpoint.open(tmp_path / "model").layers) == 1


@pytest.mark.parametrize("make", [Path.mkdir, lambda p: p.write_bytes(b"letters")])
def test_only_checkpoints_are_overwritten(tmp_path: Path, make: Callable[[Path], Any]) -> None:
    (tmp_path / "home").mkdir()
    make(tmp_path / "home" / "letters")
    for place in ("home", "home/letters") if (tmp_path / "home/letters").is_file() else ("home",):
        with pytest.raises(ConversionError, match="not a qoff checkpoint"):
            write(tmp_path / place, overwrite=True)
    assert names(tmp_path / "home") == ["letters"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_an_empty_directory_is_filled(overwrite: bool, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    write(tmp_path / "model", overwrite=overwrite)
    assert verify(tmp_path / "model").files == 4


@pytest.mark.parametrize("make", [Path.mkdir, Path.touch])
@pytest.mark.parametrize("name", ["notes", "hal.py", "model-layer-00007.safetensors.old"])
def test_a_checkpoint_with_foreign_files_is_not_overwritten(
    name: str, make: Callable[[Path], Any], tmp_path: Path
) -> None:
    make(write(tmp_path / "model") / name)
    before = names(tmp_path / "model")
    with pytest.raises(ConversionError, match=f"holds '{name}', which qoff did not write"):
        write(tmp_path / "model", overwrite=True)
    assert names(tmp_path / "model") == before


@pytest.mark.parametrize("name", [".DS_Store", "Thumbs.db", "desktop.ini"])
def test_files_of_file_managers_are_in_nobodys_way(name: str, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / name).touch()
    write(tmp_path / "model")
    (tmp_path / "model" / name).touch()
    write(tmp_path / "model", overwrite=True)
    assert verify(tmp_path / "model").files == 4
    (tmp_path / "model" / name).mkdir()
    with pytest.raises(ConversionError, match=f"holds '{name}', which qoff did not write"):
        write(tmp_path / "model", overwrite=True)


def test_what_qoff_writes_into_a_checkpoint_is_overwritten(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path / "model") as writer:
        writer.write_outer(outer_weights())
        for name in ("tokenizer.json", "hal.py"):
            writer.copy_file(name, b"")
        writer.finish({})
    (tmp_path / "model" / KV_SENSITIVITY_FILE).touch()
    write(tmp_path / "model", overwrite=True)
    assert verify(tmp_path / "model").files == 4


def test_a_checkpoint_of_an_earlier_version_is_overwritten(tmp_path: Path) -> None:
    index = write(tmp_path / "model") / INDEX_FILE
    index.write_text(json.dumps({**json.loads(index.read_text()), COPIED: None}))
    write(tmp_path / "model", overwrite=True)
    (tmp_path / "model" / INDEX_FILE).unlink()
    write(tmp_path / "model", overwrite=True)
    assert verify(tmp_path / "model").files == 4


def test_a_replacement_cut_short_is_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = content(write(tmp_path / "model"))
    plain = Path.rename

    def interrupted(path: Path, target: Path) -> Path:
        if path.name == "new":
            raise KeyboardInterrupt
        return plain(path, target)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "model", layers=1, overwrite=True)
    assert names(tmp_path) == ["model"]
    assert content(tmp_path / "model") == before


def test_a_replacement_that_was_killed_is_undone_by_the_next(tmp_path: Path) -> None:
    before = content(write(tmp_path / "model"))
    hidden = tmp_path / ".model.qoff-k1ll3d__"
    (hidden / "new").mkdir(parents=True)
    (tmp_path / "model").rename(hidden / "old")
    with pytest.raises(ConversionError, match="exists already"):
        write(tmp_path / "model")
    assert names(tmp_path) == ["model"]
    assert content(tmp_path / "model") == before


def started(place: Path) -> subprocess.Popen[str]:
    """A process that has written a layer and goes on writing."""
    process = subprocess.Popen(
        [sys.executable, "-c", WRITING, str(place)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    return process


def test_a_killed_process_leaves_only_what_the_next_removes(tmp_path: Path) -> None:
    with started(tmp_path / "model") as process:
        process.kill()
    [hidden] = tmp_path.iterdir()
    assert hidden.name.startswith(".model.qoff-")
    for folder in (hidden, hidden / "new", tmp_path / "model"):
        with pytest.raises(FormatError):
            Checkpoint.open(folder)
    write(tmp_path / "model")
    assert names(tmp_path) == ["model"]


def test_a_terminated_process_cleans_up(tmp_path: Path) -> None:
    with started(tmp_path / "model") as process:
        before = names(tmp_path)
        write(tmp_path / "model")  # another writer leaves one at work alone
        assert set(before) <= set(names(tmp_path))
        process.send_signal(signal.SIGTERM)
    assert process.returncode == 128 + signal.SIGTERM
    assert names(tmp_path) == ["model"]


def test_the_handler_of_sigterm_is_put_back(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    write(tmp_path / "model")
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_program_keeps_its_own_handler(tmp_path: Path) -> None:
    def own(*_: object) -> None: ...

    before = signal.signal(signal.SIGTERM, own)
    try:
        with CheckpointWriter(tmp_path / "model"):
            assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, before)


def test_threads_write_too(tmp_path: Path) -> None:
    threads = [threading.Thread(target=write, args=(tmp_path / n,)) for n in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert names(tmp_path) == ["a", "b"]
    assert verify(tmp_path / "a").files == verify(tmp_path / "b").files == 4


def test_leftovers_of_another_place_stay(tmp_path: Path) -> None:
    (tmp_path / ".model2.qoff-abcdefg8").mkdir()
    write(tmp_path / "model")
    assert names(tmp_path) == [".model2.qoff-abcdefg8", "model"]


def test_a_place_with_signs_of_patterns_is_cleaned(tmp_path: Path) -> None:
    (tmp_path / ".a[b]*.qoff-abcdefg8").mkdir()
    write(tmp_path / "a[b]*")
    assert names(tmp_path) == ["a[b]*"]


@pytest.mark.parametrize(
    ("layers", "config", "what"),
    [
        ([0, 2], {}, "model-layer-00001.safetensors is missing"),
        ([0, 1], {"num_hidden_layers": 3}, "num_hidden_layers 3"),
    ],
)
def test_what_would_be_no_checkpoint_is_not_published(
    tmp_path: Path, layers: list[int], config: dict[str, Any], what: str
) -> None:
    with CheckpointWriter(tmp_path / "model") as writer:
        for layer in layers:
            writer.write_layer(layer, layer_weights(layer))
        writer.write_outer(outer_weights())
        with pytest.raises(ConversionError, match=what) as caught:
            writer.finish(config)
    assert ".qoff-" not in str(caught.value)
    assert names(tmp_path) == []


def test_no_outer_weights_is_no_checkpoint(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path / "model") as writer:
        writer.write_layer(0, layer_weights(0))
        with pytest.raises(ConversionError, match=r"model-outer\.safetensors is missing"):
            writer.finish({})
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("weights", "what"),
    [
        ({"x.codes": torch.ones(1)}, "reserved"),
        ({"__metadata__": torch.ones(1)}, "reserved"),
        ({"x": torch.ones(1, dtype=torch.complex64)}, "complex64"),
    ],
)
def test_a_weight_that_cannot_be_stored_is_refused(
    tmp_path: Path, weights: dict[str, torch.Tensor], what: str
) -> None:
    with (
        pytest.raises(ConversionError, match=what),
        CheckpointWriter(tmp_path / "model") as writer,
    ):
        writer.write_outer(weights)
    assert names(tmp_path) == []


def test_what_would_leave_others_unaligned_comes_last(tmp_path: Path) -> None:
    def zeros(count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(count, dtype=dtype)

    weights = {
        "byte": zeros(1, torch.uint8),
        "scale": zeros(1, torch.float32),
        "norm": zeros(8, torch.float32),
        "halves": zeros(3, torch.float16),
        "vector": zeros(4, torch.float32),
        "double": zeros(3, torch.float64),
    }
    file = writer.unwritten(tmp_path, weights)
    assert list(file.weights) == ["norm", "vector", "double", "scale", "halves", "byte"]


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "a/b", "/tmp/a", "a\0b", "\ud800", "config.json"]
    + [f"model-{name}.safetensors" for name in ("outer", "layer-00007")],
)
def test_only_plain_files_that_the_format_has_not_are_copied(tmp_path: Path, name: str) -> None:
    with (
        pytest.raises(ConversionError, match="plain file name"),
        CheckpointWriter(tmp_path / "model") as writer,
    ):
        writer.copy_file(name, b"")


def test_a_file_is_copied_from_a_path_or_the_error_names_it(tmp_path: Path) -> None:
    (tmp_path / "vocabulary").write_bytes(b"abc")
    with CheckpointWriter(tmp_path / "model") as writer:
        writer.copy_file("v", tmp_path / "vocabulary")
        with pytest.raises(ConversionError, match=r"nowhere.*cannot be read"):
            writer.copy_file("w", tmp_path / "nowhere")
        writer.write_outer(outer_weights())
        writer.finish({})
    assert (tmp_path / "model" / "v").read_bytes() == b"abc"


def test_no_file_descriptor_stays_open(tmp_path: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    write(tmp_path / "model")
    Checkpoint.open(tmp_path / "model")
    verify(tmp_path / "model")
    assert len(list(Path("/proc/self/fd").iterdir())) == before
