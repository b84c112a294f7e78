"""Every call on files of a conversion, a run and a spill fails once: nothing wrong is left."""

from __future__ import annotations

import errno
import gc
import os
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from qoff.checkpoint import Checkpoint, verify
from qoff.engine import LLM, SamplingParams
from qoff.engine import executor as executor_module
from qoff.errors import QoffError
from qoff.kvcache import KVQuant
from qoff.kvcache.store.placement import KVPlacement
from qoff.memory import DiskReader, ThreadTransfers, WeightStore, residency_of
from qoff.memory.instrumentation import Instrumentation
from qoff.memory.io.spill import SpillFile
from qoff.models.convert.convert import convert
from qoff.plan import Plan
from tests.checkpoint.samples import write
from tests.instruments import threads_beside
from tests.io_faults import SHORT, each_call
from tests.memory.checkpoints import write_checkpoint
from tests.tiny_models import QUANT, save_model, tiny_checkpoint

HOW = {"ENOSPC": errno.ENOSPC, "EIO": errno.EIO, "short": SHORT}


@pytest.fixture(params=HOW)
def how(request: pytest.FixtureRequest) -> int:
    return HOW[request.param]


@pytest.fixture(autouse=True)
def nothing_left_open() -> Iterator[None]:
    gc.collect()
    threads, files = set(threading.enumerate()), open_files()
    yield
    gc.collect()
    assert threads_beside(threads) == []
    assert open_files() == files


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def assert_told(error: BaseException | None, place: Path) -> None:
    """An error is one of qoff that names a path."""
    if error is not None:
        assert isinstance(error, QoffError), repr(error)
        assert str(place) in str(error), error


def assert_whole_or_absent(path: Path) -> None:
    """What is at a checkpoint's place is all of one; nothing else is beside it."""
    if path.exists():
        verify(path)
    assert [x.name for x in path.parent.iterdir() if x.name.startswith(f".{path.name}.")] == []


@pytest.mark.parametrize("there", [False, True], ids=["new", "replaced"])
def test_writing_a_checkpoint(how: int, there: bool, tmp_path: Path) -> None:
    out = tmp_path / "model"
    failed = 0
    if there:
        write(out, layers=2)

    def run() -> None:
        write(out, layers=1, overwrite=there)

    for error in each_call(tmp_path, how, run, step=3):
        assert_told(error, tmp_path)
        failed += error is not None
        assert out.exists() or not there
        if out.exists():
            verify(out)
        write(out, layers=1, overwrite=True)  # once more, without a fault
        assert_whole_or_absent(out)
        if not there:
            remove(out)
    assert failed > 6


def remove(path: Path) -> None:
    for file in path.iterdir():
        file.unlink()
    path.rmdir()


def test_converting_a_model(how: int, tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out" / "model"
    save_model(source, "llama", num_hidden_layers=1)
    failed = 0
    for error in each_call(tmp_path, how, partial(convert, source, out, quant=QUANT), step=7):
        assert_told(error, tmp_path)
        failed += error is not None
        if out.exists():
            verify(out)
            remove(out)
    assert out.exists()  # the last run had no fault
    assert_whole_or_absent(out)
    assert failed > 5


def test_reading_weights(how: int, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "model", 2).path

    def run() -> None:
        checkpoint = Checkpoint.open(path)
        reader = DiskReader(preadv=lambda *given: os.preadv(*given))
        with WeightStore(
            checkpoint, residency_of(checkpoint, []), transfers=ThreadTransfers(reader)
        ) as store:
            for unit in (0, 1, "head") * 2:
                with store.use(unit):  # type: ignore[arg-type]
                    pass

    failed = 0
    for error in each_call(tmp_path, how, run):
        assert_told(error, tmp_path)
        failed += error is not None
    run()
    assert failed > 10


def test_a_run_that_spills(
    how: int,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checkpoint = tiny_checkpoint(tmp_path_factory.getbasetemp(), "llama-head64")
    spill = partial(SpillFile, pwritev=lambda *given: os.pwritev(*given))
    monkeypatch.setattr(executor_module, "SpillFile", spill)
    plan = Plan(
        batch_size=2,
        context=150,
        kv=KVQuant(window=16),
        kv_placement=KVPlacement(0, 0.3),
        activations="disk",
        spill_folder=tmp_path,
    )
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    preadv = Instrumentation(preadv=lambda *given: os.preadv(*given))
    found = []

    def run() -> None:
        with LLM(checkpoint, plan, _instrumentation=preadv) as llm:
            found.append([x.token_ids for x in llm.generate([[5] * 120, [6] * 90], params)])

    run()
    failed = 0
    for error in each_call(tmp_path, how, run, step=11):
        assert_told(error, tmp_path)
        failed += error is not None
        assert list(tmp_path.iterdir()) == []
    run()
    assert failed > 1
    assert found[1:] == found[:1] * (len(found) - 1)
