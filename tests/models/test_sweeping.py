"""Decode steps over weights that stream, as recordings whose jobs wait for slots."""

from __future__ import annotations

import _thread
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qoff.checkpoint import Checkpoint
from qoff.errors import ArgumentError, DiskReadError
from qoff.kernels.layout.ragged import Ragged
from qoff.memory import DiskReader, ThreadTransfers, Timeline, residency_of
from qoff.memory.instrumentation import Instrumentation
from qoff.memory.io.direct import Preadv
from qoff.models.forward_pass import ForwardPass
from qoff.models.native.decoder import Decoder
from qoff.models.runtime import Runtime
from tests.tiny_models import tiny_checkpoint

PROMPTS = (9, 4)
STEPS = 8


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.getbasetemp(), "llama")


@contextmanager
def opened(
    path: Path,
    slots: int = 2,
    preadv: Preadv = os.preadv,
    timeline: Timeline | None = None,
    outer: bool = True,
) -> Iterator[Run]:
    """All layers stream, and slots are poisoned; with a timeline they are computed one by one.

    outer: whether embedding and head are in memory.
    """
    checkpoint = Checkpoint.open(path)
    plan = residency_of(checkpoint, set(checkpoint.outer.weights) if outer else set(), slots)
    transfers = ThreadTransfers(DiskReader(chunk=4096, preadv=preadv))
    hooks = Instrumentation(poison=True, timeline=timeline)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("qoff.models.runtime.plan_residency", lambda *_, **__: plan)
        with Runtime(path, transfers=transfers, instrumentation=hooks) as runtime:
            yield Run(runtime)


class Run:
    """A prompt is read; then come steps, of the same tokens in every run."""

    def __init__(self, runtime: Runtime) -> None:
        assert isinstance(runtime.decoder, Decoder)
        assert runtime.decoder.replays is not None
        self.runtime, self.replays = runtime, runtime.decoder.replays
        self.begin()

    def begin(self) -> None:
        self.random = torch.Generator().manual_seed(0)
        self.cache: Any = self.runtime.new_cache(len(PROMPTS))
        self.forward(PROMPTS)

    def forward(self, counts: Sequence[int]) -> Tensor:
        ragged = Ragged.of(counts, self.cache.lengths)
        tokens = torch.randint(3, 96, (sum(counts),), generator=self.random)
        return self.runtime.forward(ForwardPass(tokens, ragged, self.cache, ragged.last_rows))

    def step(self) -> Tensor:
        return self.forward([1] * len(PROMPTS))

    def steps(self) -> Tensor:
        return torch.stack([self.step() for _ in range(STEPS)])


@pytest.fixture(scope="module")
def expected(path: Path) -> Tensor:
    """The logits of steps that are computed layer by layer."""
    with opened(path, timeline=Timeline()) as run:
        found = run.steps()
        assert run.replays.recorded >= run.runtime.spec.num_layers
        return found


@pytest.mark.parametrize("slots", [2, 3])
def test_a_step_is_one_recording_and_gives_the_same_bits(
    path: Path, expected: Tensor, slots: int
) -> None:
    """Where there are not as many layers as a multiple of the slots, one for each first slot."""
    with opened(path, slots) as run:
        assert torch.equal(run.steps(), expected)
        before = run.runtime.stats().disk_bytes
        layers = run.runtime.spec.num_layers
        turns = next(n for n in range(1, slots + 1) if n * layers % slots == 0)
        # The first step's weights may still have to be compared with their checksums.
        assert turns <= run.replays.recorded <= turns + layers
        assert run.replays.replayed >= STEPS - turns - 1
        run.step()
        assert run.runtime.stats().disk_bytes > before


def test_rows_of_an_embedding_on_disk_come_before_threads_wait_for_slots(
    path: Path, expected: Tensor
) -> None:
    with opened(path, outer=False) as run:
        assert torch.equal(run.steps(), expected)
        assert run.replays.replayed


@pytest.mark.parametrize("family", ["gemma4", "gemma4-small", "gemma3n"])
def test_gemma_is_recorded(family: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Gemma 4's outputs of layers are scaled by a number of theirs; others are given more."""
    path = tiny_checkpoint(tmp_path_factory.getbasetemp(), family)
    with opened(path, timeline=Timeline()) as alone, opened(path) as run:
        assert torch.equal(run.steps(), alone.steps())
        assert run.replays.replayed


def slow(fd: int, views: Sequence[memoryview], offset: int) -> int:
    time.sleep(0.01)  # a list of jobs ends in the middle, as signals are heard, and goes on
    return os.preadv(fd, views, offset)


def test_weights_that_come_late_are_waited_for(path: Path, expected: Tensor) -> None:
    with opened(path, preadv=slow) as run:
        assert torch.equal(run.steps(), expected)
        assert run.replays.replayed
        assert run.runtime.stats().wait_s > 0


def test_weights_that_come_early_stay_until_they_are_used(path: Path, expected: Tensor) -> None:
    with opened(path) as run:
        found = []
        for _ in range(STEPS):
            read = -1
            while read < run.runtime.stats().disk_bytes:  # until nothing more comes
                read = run.runtime.stats().disk_bytes
                time.sleep(0.005)
            found.append(run.step())
        assert torch.equal(torch.stack(found), expected)


class Trouble:
    """Reads of one layer's file that make trouble once, when asked to."""

    def __init__(self, happen: Callable[[], object]) -> None:
        self.armed = False
        self._happen, self._lock = happen, threading.Lock()

    def preadv(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        of_layer = Path(f"/proc/self/fd/{fd}").resolve().name.endswith("00001.safetensors")
        with self._lock:
            first, self.armed = self.armed and of_layer, self.armed and not of_layer
        if first:
            self._happen()
        return os.preadv(fd, views, offset)


def fail() -> None:
    raise OSError(5, "Input/output error")


@pytest.mark.parametrize(
    ("happen", "error", "text"),
    [(fail, DiskReadError, "Input/output"), (_thread.interrupt_main, KeyboardInterrupt, None)],
    ids=["a read fails", "an interrupt"],
)
def test_what_ends_a_recording_in_the_middle_ends_the_pass_and_no_more(
    path: Path,
    expected: Tensor,
    happen: Callable[[], object],
    error: type[BaseException],
    text: str | None,
    request: pytest.FixtureRequest,
) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # may be ignored here
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    trouble = Trouble(happen)
    with opened(path, preadv=trouble.preadv) as run:
        run.steps()

        def armed_steps() -> None:
            trouble.armed = True  # it comes as early as the next unit is read ahead
            run.steps()

        with pytest.raises(error, match=text):
            armed_steps()
        assert not trouble.armed
        run.begin()
        replayed = run.replays.replayed
        assert torch.equal(run.steps(), expected)
        assert run.replays.replayed > replayed


def test_closing_ends_a_recording_that_waits(path: Path) -> None:
    closed = threading.Event()

    def close() -> None:
        threading.Thread(target=lambda: (run.runtime.close(), closed.set())).start()
        time.sleep(0.05)

    trouble = Trouble(close)
    with opened(path, preadv=trouble.preadv) as run:
        run.steps()
        trouble.armed = True
        with pytest.raises((DiskReadError, ArgumentError), match=r"closed|abandoned"):
            run.steps()
        assert closed.wait(20)
