"""Damage, death and interruption in the middle of a run: one clear error and no hang, what was done
before is yielded, everything is given back, and a fault that goes away leaves nothing wrong."""

from __future__ import annotations

import errno
import gc
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from qoff.engine import LLM, Completion, SamplingParams
from qoff.engine import executor as executor_module
from qoff.engine.sampling import Sampler
from qoff.engine.schedule import Schedule
from qoff.errors import DiskReadError, DiskWriteError, QoffError
from qoff.kvcache import KVQuant, PackedCache
from qoff.kvcache.host.packed import PackedPass
from qoff.kvcache.store.placement import TIERS, KVPlacement
from qoff.kvcache.store.ring import BlockRing
from qoff.kvcache.store.sweep import BlockSweep
from qoff.kvcache.store.tiered import TieredBlocks
from qoff.memory import WeightStore
from qoff.memory.activations import JobActivations, ParkedActivations
from qoff.memory.io.spill import SpillFile
from qoff.models.native.layer import Layer
from qoff.plan import Plan
from tests.instruments import POISON, threads_beside
from tests.links import Link, behind

pytestmark = pytest.mark.timeout(60)

LETTERS = random.Random(5)
PROMPTS = [[LETTERS.randrange(4, 128) for _ in range(length)] for length in (120, 90, 30, 150, 200)]
EACH = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (40, 40, 6, 30, 12)]
PLAN = Plan(
    batch_size=2,
    batches=2,
    context=220,
    kv=KVQuant(window=16),
    kv_placement=KVPlacement(0.3, 0.3),
    cpu_attention="never",
)


def plan_with(activations: str, checkpoint: Path) -> Plan:
    """`PLAN` on a device that holds about half of the weights."""
    plan = Plan(**{**PLAN.__dict__, "activations": activations})
    with LLM(checkpoint, plan) as llm:
        memory = llm.memory.total("device") + llm.runtime.residency.device_bytes * 2 // 3
    return Plan(**{**plan.__dict__, "device_memory": memory})


@pytest.fixture(scope="module")
def plans(checkpoint: Path) -> dict[str, Plan]:
    """They stay as they are, however slow the machine is: faults are put where they come by."""
    tiers = ("device", "host", "disk")
    return {tier: replace(plan_with(tier, checkpoint), adapt=False) for tier in tiers}


@pytest.fixture(scope="module")
def expected(checkpoint: Path, plans: dict[str, Plan]) -> list[Completion]:
    with LLM(checkpoint, plans["device"]) as llm:
        return answers(llm)


def answers(llm: LLM) -> list[Completion]:
    return llm.generate(PROMPTS, EACH)


@pytest.fixture(autouse=True)
def nothing_left_behind(checkpoint: Path, expected: list[Completion]) -> Iterator[None]:
    """No thread and no descriptor survives a test."""
    gc.collect()
    before = len(list(Path("/proc/self/fd").iterdir()))
    threads = set(threading.enumerate())
    yield
    gc.collect()
    assert threads_beside(threads) == []
    assert len(list(Path("/proc/self/fd").iterdir())) == before


class Faulty(Link):
    """A fast link on which, while `broken`, what `strikes` raises `fault`."""

    def __init__(self, fault: BaseException, strikes: Callable[[str], bool]) -> None:
        super().__init__(1e12)
        self.broken = False
        self._fault = fault
        self._strikes = strikes

    def strike(self, what: str) -> None:
        if self.broken and self._strikes(what):
            raise self._fault

    def preadv(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        self.strike(os.readlink(f"/proc/self/fd/{fd}"))  # noqa: PTH115 - spill files have no path
        return os.preadv(fd, views, offset)

    def pwritev(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        self.strike("write")
        return os.pwritev(fd, views, offset)

    def pass_through(self, nbytes: int) -> None:
        self.strike(threading.current_thread().name)


def is_spilled(path: str) -> bool:
    return path.endswith("(deleted)")


def is_layer(path: str) -> bool:
    return path.endswith("model-layer-00004.safetensors")


EIO = OSError(errno.EIO, "Input/output error")
FAULTS: dict[str, tuple[BaseException, Callable[[str], bool], type[QoffError], str]] = {
    "weights cannot be read": (EIO, is_layer, DiskReadError, "00004.*Input/output error"),
    "KV cannot be read": (EIO, is_spilled, DiskReadError, "Input/output error"),
    "KV cannot be written": (EIO, "write".__eq__, DiskWriteError, "Input/output error"),
    "KV cannot be copied": (EIO, lambda w: "copy" in w, OSError, "Input/output error"),  # type: ignore[dict-item]
    "the weights' reader dies": (SystemExit(1), is_layer, DiskReadError, "died"),
    "the spilled file's reader dies": (SystemExit(1), is_spilled, DiskReadError, "died"),
    # What moves hidden states writes them, too.
    "the writer dies": (SystemExit(1), "write".__eq__, QoffError, "died"),
    "the copier dies": (SystemExit(1), lambda w: "copy" in w, DiskReadError, "died"),
}


def assert_nothing_held(llm: LLM) -> None:
    """No block of KV cache is used and no slot of the ring taken."""
    assert {tier: llm.blocks.used(tier) for tier in TIERS} == dict.fromkeys(TIERS, 0)
    ring = llm.blocks.ring
    fetches = [ring.start(lambda memory: [], must=False) for _ in range(2)]
    for fetch in fetches:
        assert fetch is not None
        ring.drop(fetch)


@pytest.mark.parametrize("activations", ["disk"])
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_the_middle_of_a_run(
    name: str,
    activations: str,
    checkpoint: Path,
    plans: dict[str, Plan],
    expected: list[Completion],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fault, strikes, kind, message = FAULTS[name]
    link = Faulty(fault, strikes)
    monkeypatch.setattr(executor_module, "SpillFile", partial(SpillFile, pwritev=link.pwritev))
    plan = plans[activations]
    with LLM(checkpoint, plan, _instrumentation=behind(link, link, POISON)) as llm:
        results = llm.stream(PROMPTS, EACH)
        assert next(results) == expected[2]
        link.broken = True
        with pytest.raises(kind, match=message):
            list(results)
        assert list(results) == []
        assert_nothing_held(llm)
        if isinstance(fault, Exception):
            link.broken = False
            assert answers(llm) == expected
        else:
            with pytest.raises(QoffError, match="died"):
                answers(llm)
        assert_nothing_held(llm)
    llm.close()


class Interrupt:
    """A method that raises at its nth call and is itself otherwise."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, nth: int) -> None:
        self._left = nth
        real = getattr(owner, name)

        def method(this: Any, *rest: Any, **options: Any) -> Any:
            self._left -= 1
            if self._left == 0:
                raise KeyboardInterrupt
            return real(this, *rest, **options)

        monkeypatch.setattr(owner, name, method)

    @property
    def happened(self) -> bool:
        return self._left <= 0


PLACES = [
    (BlockSweep, "open"),  # while rounds are recorded, which comes first
    (JobActivations, "load"),
    (BlockSweep, "start"),
    (Layer, "_mlp"),
    (PackedPass, "open"),
    (PackedPass, "close"),
    (PackedPass, "end"),
    (PackedCache, "begin"),
    (TieredBlocks, "fill"),
    (TieredBlocks, "bring"),
    (TieredBlocks, "allocate"),
    (BlockRing, "use"),
    (WeightStore, "acquire"),
    (WeightStore, "release"),
    (ParkedActivations, "load"),
    (ParkedActivations, "store"),
    (Sampler, "draw"),
]


def test_an_interrupted_pass_gives_everything_back(
    checkpoint: Path, plans: dict[str, Plan], expected: list[Completion]
) -> None:
    with LLM(checkpoint, plans["host"], _instrumentation=POISON) as llm:
        for owner, name in PLACES:
            with pytest.MonkeyPatch.context() as patched:
                interrupt = Interrupt(patched, owner, name, 3)
                with pytest.raises(KeyboardInterrupt):
                    answers(llm)
                assert interrupt.happened, f"{owner.__name__}.{name}"
            assert_nothing_held(llm)
        assert answers(llm) == expected
        assert_nothing_held(llm)


def test_an_interrupted_pass_of_a_draft_model_is_done_again(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the beginning of its sequences, some layers of which were written over."""
    kv = KVQuant(window=16)
    plan = Plan(batch_size=1, context=220, kv=kv, draft_model=str(checkpoint), draft_tokens=4)
    with LLM(checkpoint, plan, device="cpu") as llm:
        wanted = llm.generate(PROMPTS[4:], EACH[4:])
        drafts = llm._rounds.current.opened.drafts
        assert drafts is not None
        forward = drafts.executor.runtime.forward

        def interrupted(run: Any) -> Any:
            with pytest.MonkeyPatch.context() as patched:
                Interrupt(patched, Layer, "_mlp", 2)
                return forward(run)

        with monkeypatch.context() as patched:
            patched.setattr(drafts.executor.runtime, "forward", interrupted)
            with pytest.raises(KeyboardInterrupt):
                llm.generate(PROMPTS[4:], EACH[4:])
        before = len(llm.rounds)
        assert llm.generate(PROMPTS[4:], EACH[4:]) == wanted
        assert sum(one.accepted for one in llm.rounds[before:]) > 0


def test_a_generator_of_a_closed_llm_ends_with_an_error(
    checkpoint: Path, plans: dict[str, Plan]
) -> None:
    llm = LLM(checkpoint, plans["disk"])
    results = llm.stream(PROMPTS, EACH)
    next(results)
    llm.close()
    with pytest.raises(QoffError, match=r"closed|no longer"):
        list(results)
    llm.close()


class Recorded:
    """A pass that only remembers that it was abandoned."""

    def __init__(self, number: int, fails: bool) -> None:
        self.number, self.abandoned = number, False
        self._fails = fails

    def abandon(self) -> None:
        self.abandoned = True
        if self._fails:
            raise RuntimeError("cannot be abandoned")


def test_one_pass_that_fails_abandons_all_even_if_one_cannot_be() -> None:
    class Steps:
        def steps(self, run: Recorded) -> Iterator[int]:
            if run.number == 1:
                raise ZeroDivisionError
            yield 0

    passes: list[Any] = [Recorded(i, fails) for i, fails in enumerate((False, True, False))]
    decoder: Any = Steps()
    schedule = Schedule(decoder, None, "column")  # type: ignore[arg-type]
    with pytest.raises((ZeroDivisionError, RuntimeError)):
        schedule.round(passes)
    assert [one.abandoned for one in passes] == [True] * 3
