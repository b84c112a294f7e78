"""A run goes on from its checkpoint bit for bit, and writing one never costs the one before."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from qoff import train
from qoff.errors import (
    ArgumentError,
    ChecksumError,
    DiskReadError,
    DiskWriteError,
    FormatError,
    QoffError,
)
from qoff.train import checkpoints
from qoff.train.checkpoints import exists
from tests.io_faults import SHORT, each_call
from tests.tiny_models import tiny_checkpoint

from .test_lora import batches as lora_batches
from .test_lora import training_of as training_of_adapters
from .test_training import LR, PLACES, batch, model_of, offloaded


def training_of(place: str, folder: Path, bits: int = 32, **options: Any) -> train.Training:
    model = model_of("llama", torch.bfloat16, attention_dropout=0.2)
    return offloaded(model, place, folder, optimizer=train.AdamW(lr=LR, bits=bits), **options)


def steps(training: train.Training, count: int) -> list[float]:
    numbers = range(training.steps, training.steps + count)
    return [training.step([batch(i), batch(i + 9)]) for i in numbers]


def assert_same(a: train.Training, b: train.Training) -> None:
    assert a.steps == b.steps
    theirs = b.state_dict()
    assert all(torch.equal(x, theirs[name]) for name, x in a.state_dict().items())


def without_copies(*_: object) -> int:
    raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))


@pytest.mark.parametrize(
    ("before", "after", "bits", "copies"),
    [
        (PLACES[0], PLACES[0], 8, True),
        (PLACES[1], PLACES[1], 32, True),
        (PLACES[2], PLACES[2], 8, False),
        (PLACES[0], PLACES[2], 32, True),
    ],
)
def test_a_resumed_run_is_the_same_bit_for_bit(
    before: str,
    after: str,
    bits: int,
    copies: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not copies:
        monkeypatch.setattr(os, "copy_file_range", without_copies)
    torch.manual_seed(7)
    whole = training_of(before, tmp_path, bits)
    wanted = steps(whole, 4)
    torch.manual_seed(7)
    first = training_of(before, tmp_path, bits)
    found = steps(first, 2)
    first.save(tmp_path / "run", position={"line": 4})
    steps(first, 1)  # what comes after it is not in it
    torch.manual_seed(99)
    second = training_of(after, tmp_path, bits)
    assert second.resume(tmp_path / "run") == {"line": 4}
    assert [*found, *steps(second, 2)] == wanted
    assert_same(second, whole)


def test_a_resumed_run_of_adapters_is_the_same(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    path = tiny_checkpoint(tmp_path_factory.getbasetemp(), "llama")
    options: dict[str, Any] = {"host_memory": 0, "disk": tmp_path}
    whole, first = (training_of_adapters(path, **options) for _ in range(2))
    wanted = [whole.step(lora_batches(i)) for i in range(4)]
    found = [first.step(lora_batches(i)) for i in range(2)]
    first.save(tmp_path / "run")
    second = training_of_adapters(path, **options)
    assert second.resume(tmp_path / "run") is None
    assert found + [second.step(lora_batches(i)) for i in (2, 3)] == wanted
    assert_same(second, whole)


@contextmanager
def disk_that_ends(training: train.Training, code: int, writes: int) -> Iterator[None]:
    """Every write fails from the time on when an update has made so many."""
    spill, steps, left = training._homes._spill, training._engine.parts.steps, writes
    assert spill is not None
    own, lock = spill._pwritev, threading.Lock()

    def write(fd: int, views: Sequence[memoryview], offset: int) -> int:
        nonlocal left
        with lock:
            left -= steps.changing
            full = left < 0
        if full:
            raise OSError(code, os.strerror(code))
        return own(fd, views, offset)

    spill._pwritev = write
    yield
    spill._pwritev = own
    assert left < 0


@pytest.mark.parametrize(
    ("place", "code", "options"),
    [
        (PLACES[1], errno.ENOSPC, {}),
        (PLACES[2], errno.EIO, {"max_norm": 0.1}),
        (PLACES[2], errno.ENOSPC, {"delayed": True}),
    ],
    ids=["states", "all, clipped", "all, delayed"],
)
def test_a_run_whose_update_failed_goes_on_from_its_checkpoint_bit_for_bit(
    place: str, code: int, options: dict[str, Any], tmp_path: Path
) -> None:
    torch.manual_seed(7)
    whole = training_of(place, tmp_path, **options)
    wanted = steps(whole, 4)
    torch.manual_seed(7)
    first = training_of(place, tmp_path, **options)
    found = steps(first, 2)
    first.save(tmp_path / "run")
    for writes in (0, 1, 2):
        with disk_that_ends(first, code, writes), pytest.raises(DiskWriteError):
            steps(first, 1)
        with pytest.raises(ArgumentError, match="half-way"):
            first.state_dict()
        first.resume(tmp_path / "run")
    for resumed in (first, training_of(place, tmp_path, **options)):
        torch.manual_seed(99)
        resumed.resume(tmp_path / "run")
        assert [*found, *steps(resumed, 2)] == wanted
        assert_same(resumed, whole)


@pytest.mark.parametrize("how", [errno.ENOSPC, SHORT], ids=["ENOSPC", "short"])
def test_the_former_checkpoint_stays_until_the_new_one_is_whole(how: int, tmp_path: Path) -> None:
    root, disk = tmp_path / "run", tmp_path / "disk"
    training = training_of(PLACES[1], disk)
    training.save(root, position=0)
    former = training.state_dict()
    steps(training, 1)
    latter, reader, failed = training.state_dict(), training_of(PLACES[0], disk), 0
    for error in each_call(root, how, partial(training.save, root, position=1), step=5):
        assert error is None or isinstance(error, QoffError)
        failed += error is not None
        position = reader.resume(root)
        assert position == reader.steps
        wanted = latter if position else former
        assert all(torch.equal(x, wanted[name]) for name, x in reader.state_dict().items())
    assert failed > 2
    assert sorted(p.suffix for p in root.iterdir()) == [".json", ".state"]  # nothing left over


def test_a_run_that_is_killed_leaves_the_former_checkpoint(tmp_path: Path) -> None:
    """The process ends at once in the middle of writing, or before the new one has its name."""
    training = training_of(PLACES[0], tmp_path)
    training.save(tmp_path / "run", position="former")
    steps(training, 1)
    for call in ("pwritev", "rename"):
        pid = os.fork()
        if pid == 0:
            setattr(os, call, lambda *_: os._exit(9))
            training.save(tmp_path / "run", position="latter")
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
        assert training_of(PLACES[0], tmp_path).resume(tmp_path / "run") == "former"
    training.save(tmp_path / "run", position="latter")
    assert training_of(PLACES[0], tmp_path).resume(tmp_path / "run") == "latter"
    assert len(list((tmp_path / "run").iterdir())) == 2  # what was left behind is gone


def test_what_a_killed_save_left_takes_no_room_from_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk has room for the checkpoint that is there and a new one, not for a third."""
    root = tmp_path / "run"
    training = training_of(PLACES[0], tmp_path)
    training.save(root, position=0)
    (root / "step-1-0badf00d.state").write_bytes(b"of a process that was killed")
    (good,) = {p.name for p in root.glob("*.state")} - {"step-1-0badf00d.state"}
    there: list[list[str]] = []

    def full(path: Path, *_: object) -> str:
        there.append([p.name for p in root.glob("*.state")])
        path.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "_write", full)
        with pytest.raises(DiskWriteError, match="No space left"):
            training.save(root, position=1)
    assert there == [[good]]
    assert training_of(PLACES[0], tmp_path).resume(root) == 0


def test_states_stay_where_the_header_names_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be of a later version, or have been edited: a save that fails costs nothing."""
    root = tmp_path / "run"
    training = training_of(PLACES[0], tmp_path)
    training.save(root, position=0)
    before = {p.name for p in root.glob("*.state")}
    (root / "run.json").write_text("{}")

    def full(*_: object) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoints, "_write", full)
    with pytest.raises(DiskWriteError, match="No space left"):
        training.save(root, position=1)
    assert {p.name for p in root.glob("*.state")} == before


def test_what_fails_before_a_header_has_its_name_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "run"
    training = training_of(PLACES[0], tmp_path)
    training.save(root, position=0)
    sync = os.fsync

    def fails_on(end: str, descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(end):  # noqa: PTH115
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(descriptor)

    # Of the folder: the header is there, under its name.
    for end, advice in (("json.new", "as before"), ("/run", "of step 0 is there")):
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", partial(fails_on, end))
            with pytest.raises(DiskWriteError, match=f"Input/output error; .* {advice}"):
                training.save(root, position=1)
        found = sorted(p.suffix for p in root.iterdir())
        assert found == [".json", ".state", ".state"][: 2 + (end == "/run")]


def test_a_run_that_is_killed_at_any_moment_loses_few_steps(tmp_path: Path) -> None:
    """SIGKILL while it computes, steps weights on disk or saves; each process goes on after it."""
    run, last, every, kills = tmp_path / "run", 10, 2, 6

    def train_on(told: int) -> None:
        torch.manual_seed(7)
        training = training_of(PLACES[2], tmp_path)
        if exists(run):
            training.resume(run)
        while training.steps < last:
            (loss,) = steps(training, 1)
            os.write(told, f"{training.steps} {loss!r}\n".encode())
            if training.steps % every == 0:
                training.save(run)

    moments, losses, before = random.Random(5), dict[int, float](), 0
    for turn in range(kills + 1):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                train_on(write)
            finally:
                os._exit(0)
        os.close(write)
        with os.fdopen(read) as told:
            rows = []
            if turn < kills:
                rows = [told.readline() for _ in range(moments.randrange(1, 4))]
                time.sleep(moments.uniform(0, 0.05))
                os.kill(pid, signal.SIGKILL)
            rows += told.readlines()
        os.waitpid(pid, 0)
        found = [(int(step), float(loss)) for step, loss in map(str.split, filter(None, rows))]
        for step, loss in found:
            assert losses.setdefault(step, loss) == loss
        if found:
            assert found[0][0] > before - every
            before = found[-1][0]
    torch.manual_seed(7)
    assert list(losses.items()) == list(enumerate(steps(training_of(PLACES[2], tmp_path), last), 1))


@pytest.mark.parametrize("place", [PLACES[0], PLACES[2]])
def test_a_flipped_bit_is_refused_before_anything_is_changed(place: str, tmp_path: Path) -> None:
    training = training_of(place, tmp_path)
    steps(training, 1)
    training.save(tmp_path / "run")
    steps(training, 1)
    wanted = {name: x.clone() for name, x in training.state_dict().items()}
    (states,) = (tmp_path / "run").glob("*.state")
    data = bytearray(states.read_bytes())
    data[len(data) // 3] ^= 4
    states.write_bytes(data)
    with pytest.raises(ChecksumError, match=r"SHA-256 is [0-9a-f]+, run.json says .* is damaged"):
        training.resume(tmp_path / "run")
    assert training.steps == 2
    assert all(torch.equal(x, wanted[name]) for name, x in training.state_dict().items())
    header = json.loads((tmp_path / "run/run.json").read_text())
    del header["sha256"]  # as before there was one
    (tmp_path / "run/run.json").write_text(json.dumps(header))
    training.resume(tmp_path / "run")
    assert training.steps == 1


def test_other_checkpoints_are_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    training = training_of(PLACES[0], tmp_path)
    with pytest.raises(FormatError, match=r"run.json: cannot be read .*training.save"):
        training.resume(run)
    with pytest.raises(ArgumentError, match="what JSON can hold"):
        training.save(run, position=object())
    training.save(run)
    with pytest.raises(ArgumentError, match="another run: its bits are 32, here 8"):
        training_of(PLACES[0], tmp_path, bits=8).resume(run)
    other = offloaded(model_of("tied"), PLACES[0], tmp_path, optimizer=train.AdamW(lr=LR))
    with pytest.raises(
        ArgumentError, match=r"its weights are model\S+ bfloat16 \[.*\], here model\S+ float32 "
    ):
        other.resume(run)
    (states,) = run.glob("*.state")
    os.truncate(states, 4096)
    with pytest.raises(FormatError, match=r"4,096 bytes, not [\d,]+: it is not whole"):
        training.resume(run)
    states.unlink()
    with pytest.raises(DiskReadError, match=f"{states.name}: No such file"):
        training.resume(run)
    header = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({"version": 1}))
    with pytest.raises(FormatError, match="states is missing"):
        training.resume(run)
    for damage in (
        {"states": "../x.state"},
        {"loss_scale": {"value": 0, "good": 0}},
        {"loss_scale": {"x": 1}},
        {"pending": {"step": 1, "scale": "1"}},
    ):
        (run / "run.json").write_text(json.dumps(header | damage))
        with pytest.raises(FormatError, match=f"{next(iter(damage))} is"):
            training.resume(run)
    steps(training, 1)  # a checkpoint that is refused changes nothing
