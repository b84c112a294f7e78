"""Rounds in which something moves as one recording each: the same answers, and every trouble with
what is read ends the round and no more."""

from __future__ import annotations

import _thread
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from qoff.engine import LLM, SamplingParams
from qoff.errors import ArgumentError, DiskReadError, QoffError
from qoff.kvcache import KVQuant
from qoff.kvcache.store.placement import KVPlacement
from qoff.memory.instrumentation import Instrumentation
from qoff.memory.plan import HEAD
from qoff.memory.plan.layouts import Choice
from qoff.memory.plan.placement import _Search
from qoff.models import runtime
from qoff.models.native import sweeping
from qoff.models.native.decoder import Decoder
from qoff.plan import Plan
from tests.instruments import POISON

pytestmark = pytest.mark.timeout(60)

LETTERS = random.Random(8)
PROMPTS = [[LETTERS.randrange(4, 128) for _ in range(length)] for length in (150, 1, 97, 200)]
PARAMS = SamplingParams(temperature=0, max_tokens=70, ignore_eos=True)  # each completes a block
PLAN = Plan(
    batch_size=2, batches=2, context=300, kv=KVQuant(window=16), cpu_attention="never", adapt=False
)
TILED = 0.3  # of the weights, which stream in small tiles, those of the head too
PLANS: dict[str, tuple[dict[str, Any], float]] = {  # beside `PLAN`, and the part of the weights
    "KV on the host": ({"kv_placement": KVPlacement(0, 1)}, 1),
    "KV on disk": ({"kv_placement": KVPlacement(0, 0)}, 1),
    "KV on three tiers, weights on disk": ({"kv_placement": KVPlacement(0.3, 0.4)}, 0.5),
    "KV on three tiers, one batch": (
        {"kv_placement": KVPlacement(0.3, 0.4), "batch_size": 4, "batches": 1}, 1,
    ),
    "hidden states on the host": ({"activations": "host"}, 1),
    "hidden states on the host, the rest on disk": (
        {"activations": "host", "kv_placement": KVPlacement(0, 0)}, 0.5,
    ),
    "sequential": ({"schedule": "sequential", "kv_placement": KVPlacement(0, 0.5)}, 0.5),
    "units in tiles": ({}, TILED),
    # Three batches have more hidden states than there are windows for them.
    "units in tiles, hidden states on the host": (
        {"activations": "host", "batch_size": 1, "batches": 3}, TILED,
    ),
    "units in tiles, sequential": ({"schedule": "sequential"}, TILED),
}  # fmt: skip


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[tuple[int, ...]]:
    """The answers when everything is resident."""
    with LLM(checkpoint, PLAN) as llm:
        return answers(llm)


def answers(llm: LLM, params: SamplingParams = PARAMS) -> list[tuple[int, ...]]:
    return [one.token_ids for one in llm.generate(PROMPTS, params)]


def plan_of(checkpoint: Path, name: str) -> Plan:
    options, part = PLANS[name]
    plan = replace(PLAN, **options)
    if part == 1:
        return plan
    with LLM(checkpoint, plan) as llm:
        rest, weights = llm.memory.total("device"), llm.runtime.residency.device_bytes
    return replace(plan, device_memory=rest + int(weights * part))


def replays_of(llm: LLM) -> Any:
    decoder = llm.runtime.decoder
    assert isinstance(decoder, Decoder)
    return decoder.replays


@pytest.mark.parametrize("name", PLANS)
def test_a_round_is_one_recording_and_gives_the_same_answers(
    name: str,
    checkpoint: Path,
    expected: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if PLANS[name][1] == TILED:
        # What prompts leave between tiles takes more than all weights of this model.
        monkeypatch.setattr(Plan, "tile_bytes", lambda *_: 0)
        monkeypatch.setattr(_Search, "_choice", lambda *_: Choice((), 0, tile_bytes=4096))
    plan, replayed = plan_of(checkpoint, name), list[int]()
    compute = sweeping._Round.compute

    def counted(one: sweeping._Round) -> list[Tensor]:
        before = one._replays.replayed
        found = compute(one)
        replayed.append(one._replays.replayed - before)
        return found

    monkeypatch.setattr(sweeping._Round, "compute", counted)
    with LLM(checkpoint, plan, _instrumentation=POISON) as llm:
        # Tiles are many, and one answer completes a block soon.
        params = replace(PARAMS, max_tokens=35) if PLANS[name][1] == TILED else PARAMS
        assert answers(llm, params) == [one[: params.max_tokens] for one in expected]
        assert len(replayed) == sum(not one.read for one in llm.rounds)
        assert len(replayed) / 2 < sum(replayed) <= len(replayed)
        tiles = llm.runtime.residency.tiles
        assert sum(tile.unit == HEAD for tile in tiles) > 1 or PLANS[name][1] != TILED
        moved = llm.rounds[-1]
        assert moved.host_bytes + moved.disk_bytes > 0
        assert all(llm.blocks.used(tier) == 0 for tier in ("device", "host", "disk"))


@pytest.mark.parametrize("name", ["KV on the host", "hidden states on the host"])
def test_as_many_bytes_are_copied_as_in_rounds_that_are_launched(
    name: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(checkpoint, name)

    def copied() -> dict[tuple[int, int], float]:
        with LLM(checkpoint, plan) as llm:
            answers(llm)
            return {(one.number, one.read): one.host_bytes for one in llm.rounds}

    swept = copied()
    monkeypatch.setattr(runtime, "sweep_passes", lambda *_: None)
    assert copied() == swept


class Spilled:
    """Reads of the spill file, of which one does something when it is asked to."""

    def __init__(self, happen: Callable[[], object], every: bool = False) -> None:
        self.armed = False
        self._happen, self._every, self._lock = happen, every, threading.Lock()

    def preadv(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        spilled = os.readlink(f"/proc/self/fd/{fd}").endswith("(deleted)")  # noqa: PTH115
        with self._lock:
            happens = self.armed and spilled
            self.armed &= self._every or not happens
        if happens:
            self._happen()
        return os.preadv(fd, views, offset)


@contextmanager
def reading(
    checkpoint: Path, reads: Spilled, monkeypatch: pytest.MonkeyPatch, rounds: int = 20
) -> Iterator[LLM]:
    """All blocks and half of the weights on disk, whose reads make trouble after some rounds."""
    compute, left = sweeping._Round.compute, [rounds]

    def counted(one: sweeping._Round) -> list[Tensor]:
        left[0] -= 1
        reads.armed |= left[0] == 0
        return compute(one)

    monkeypatch.setattr(sweeping._Round, "compute", counted)
    plan = plan_of(checkpoint, "hidden states on the host, the rest on disk")
    hooks = Instrumentation(poison=True, preadv=reads.preadv)
    with LLM(checkpoint, plan, _instrumentation=hooks) as llm:
        yield llm


def fail() -> None:
    raise OSError(5, "Input/output error")


def die() -> None:
    raise SystemExit(1)


@pytest.mark.parametrize(
    ("happen", "error", "text"),
    [(fail, DiskReadError, "Input/output"), (_thread.interrupt_main, KeyboardInterrupt, None)],
    ids=["a read fails", "an interrupt"],
)
def test_what_ends_a_round_in_the_middle_ends_no_more(
    happen: Callable[[], object],
    error: type[BaseException],
    text: str | None,
    checkpoint: Path,
    expected: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # may be ignored here
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    reads = Spilled(happen)
    with reading(checkpoint, reads, monkeypatch) as llm:
        with pytest.raises(error, match=text):
            answers(llm)
        assert not reads.armed
        assert llm.blocks.ring.idle
        replayed = replays_of(llm).replayed
        assert answers(llm) == expected
        assert replays_of(llm).replayed > replayed + 30


def test_the_death_of_a_reader_is_an_error(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with reading(checkpoint, Spilled(die), monkeypatch) as llm:
        for _ in range(2):
            with pytest.raises(DiskReadError, match="died"):
                answers(llm)


def test_blocks_that_come_late_are_waited_for(
    checkpoint: Path, expected: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list of jobs ends in the middle, as signals are heard, and goes on."""
    slow = Spilled(partial(time.sleep, 0.01), every=True)
    with reading(checkpoint, slow, monkeypatch, rounds=60) as llm:
        assert answers(llm) == expected
        assert slow.armed
        assert llm.rounds[-1].kv_wait_s > 0


def test_closing_ends_a_round_that_waits(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = threading.Event()

    def close() -> None:
        threading.Thread(target=lambda: (llm.close(), closed.set())).start()
        time.sleep(0.05)

    with reading(checkpoint, Spilled(close), monkeypatch) as llm:
        with pytest.raises((QoffError, ArgumentError)):
            answers(llm)
        assert closed.wait(20)
