"""Models of qoff.load in a forked process: what needs the parent's threads says so, at once."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch

import qoff
from qoff.models.runtime import Runtime
from qoff.process import ForkLock
from tests.forks import in_child
from tests.tiny_models import load_budgets

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
    pytest.mark.timeout(300),  # kernels may have to be compiled
]
IDS = torch.arange(4, 20)[None]


def test_a_model_that_streams_is_told_of_its_process(checkpoint: Path) -> None:
    least, _ = load_budgets(checkpoint)
    with qoff.load(checkpoint, device_memory=least)[0] as model:
        before = model(IDS).logits
        told = f"ArgumentError: this model was opened by process {os.getpid()}"
        for work in (
            lambda: model(IDS),
            lambda: model.generate(IDS, max_new_tokens=2),
            model.stats,
        ):
            assert in_child(work).startswith(told)
        assert in_child(model.close) == "None"
        assert torch.equal(model(IDS).logits, before)  # of the child's close


def test_a_model_in_memory_computes_in_a_forked_process(checkpoint: Path) -> None:
    """Even if another thread of the parent was in a pass."""
    with qoff.load(checkpoint)[0] as model:
        expected = model(IDS).logits.argmax(-1).tolist()
        inside, leave = threading.Event(), threading.Event()

        def hold() -> None:
            with model.runtime._turn:
                inside.set()
                leave.wait()

        holder = threading.Thread(target=hold)
        holder.start()
        inside.wait()
        assert in_child(lambda: model(IDS).logits.argmax(-1).tolist()) == repr(expected)
        leave.set()
        holder.join()


def test_a_model_on_a_gpu_says_how_to_start_a_process(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with qoff.load(checkpoint)[0] as model:
        store = model.runtime.store
        monkeypatch.setattr(store._transfers, "device", torch.device("cuda", 0))
        monkeypatch.setattr(store._opener, "_on_gpu", True)
        for work in (lambda: model(IDS), lambda: model.generate(IDS, max_new_tokens=2)):
            told = in_child(work)
            assert told.startswith(f"ArgumentError: this model was opened by process {os.getpid()}")
            assert "'spawn'" in told


def test_a_runtime_that_is_dropped_in_a_forked_process_waits_for_nothing(checkpoint: Path) -> None:
    """Its finalizer closes nothing there, although locks may be held by threads that are lost."""
    least, _ = load_budgets(checkpoint)
    model, _ = qoff.load(checkpoint, device_memory=least)
    runtime: list[Runtime] = [model.runtime]
    with runtime[0].store._ring._lock, runtime[0].store._transfers.reader._lock:
        model.runtime = None  # type: ignore[assignment]
        assert in_child(runtime.clear) == "None"
    runtime[0].close()


def test_a_lock_is_free_in_a_forked_process() -> None:
    lock = ForkLock()

    def take() -> str:
        with lock:
            return "taken"

    with lock:
        assert take() == "taken"  # by the same thread
        assert in_child(take) == "'taken'"
