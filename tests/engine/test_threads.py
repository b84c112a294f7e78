"""One LLM for many callers: in threads, interrupted, closed under them, in a forked process."""

from __future__ import annotations

import gc
import os
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from qoff import process
from qoff.engine import LLM, SamplingParams
from qoff.engine.batch import BatchSlots
from qoff.engine.calls import Call
from qoff.engine.request import Sequence
from qoff.errors import ArgumentError, DiskReadError
from qoff.kvcache import KVQuant
from qoff.memory.instrumentation import Instrumentation
from qoff.plan import Plan
from tests.forks import in_child
from tests.instruments import POISON, KeptPages

RANDOM = random.Random(5)
PROMPTS = [[RANDOM.randrange(4, 128) for _ in range(RANDOM.randrange(1, 120))] for _ in range(24)]
PARAMS = [
    SamplingParams(
        temperature=float(i % 2), seed=i, max_tokens=5 + 3 * (i % 7), n=1 + i % 2, ignore_eos=True
    )
    for i in range(len(PROMPTS))
]
# What is rounded depends on who shares a prefix; in 8 bits it is too little to choose a token.
PLAN = Plan(batch_size=3, batches=2, context=200, kv=KVQuant(8, 8, window=16), share_prefixes=True)


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[list[tuple[int, ...]]]:
    """The answers to each prompt when it is alone."""
    with LLM(checkpoint, PLAN) as llm:
        return [answers(llm, i) for i in range(len(PROMPTS))]


@pytest.fixture
def llm(checkpoint: Path) -> Iterator[LLM]:
    with LLM(checkpoint, PLAN, _instrumentation=POISON) as llm:
        yield llm


def answers(llm: LLM, number: int) -> list[tuple[int, ...]]:
    return [one.token_ids for one in llm.generate([PROMPTS[number]], PARAMS[number])]


class Calls:
    """Threads that call again and again, of which a slow machine may wake one late."""

    def __init__(self, threads: int) -> None:
        self._outside = threads
        self._changed = threading.Condition()

    @contextmanager
    def one(self) -> Iterator[None]:
        """A call."""
        self._move(-1)
        try:
            yield
        finally:
            self._move(1)

    def end(self) -> None:
        """A thread calls no more."""
        self._move(-1)

    def wait(self) -> None:
        """Until all threads that are left are in a call."""
        with self._changed:
            assert self._changed.wait_for(lambda: not self._outside, timeout=60)

    def _move(self, by: int) -> None:
        with self._changed:
            self._outside += by
            self._changed.notify_all()


def in_round(llm: LLM, do: Callable[[], object], after: int = 0, running: int = 0) -> None:
    """Do something once, in the middle of a round when there were so many.

    running: sequences that have a place then.
    """
    schedule: Any = llm._rounds._schedule
    schedule.steps = lambda *_: []  # a token a round
    compute = schedule.round

    def round_(passes: Any) -> Any:
        found = compute(passes)
        there = sum(len(one.sequences()) for one in llm._rounds.current.opened.batches)
        if len(llm.rounds) >= after and there >= running:
            schedule.round = compute
            do()
        return found

    schedule.round = round_


def test_callers_in_threads_share_rounds_and_get_their_own_answers(
    llm: LLM, expected: list[list[tuple[int, ...]]]
) -> None:
    calls = Calls(8)

    def caller(first: int) -> None:
        for i in range(first, len(PROMPTS), 8):
            if i % 3:
                with calls.one():
                    found = answers(llm, i)
                assert found == expected[i]
                continue
            with calls.one():
                both = [PROMPTS[i], PROMPTS[first]], [PARAMS[i], PARAMS[first]]
                streamed = list(llm.stream(*both))
            for index, number in enumerate((i, first)):
                of_one = sorted((x.sample, x.token_ids) for x in streamed if x.index == index)
                assert [tokens for _, tokens in of_one] == expected[number]

    def until_the_end(first: int) -> None:
        try:
            caller(first)
        finally:
            calls.end()

    schedule: Any = llm._rounds._schedule
    compute = schedule.round
    schedule.round = lambda passes: (calls.wait(), compute(passes))[1]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(until_the_end, range(8)))
    generated = sum(one.generated for one in llm.rounds)
    assert generated > 2.5 * len(llm.rounds)  # one caller alone has at most 2 or 4
    assert llm.blocks.used("device") == 0


def test_streams_in_one_thread_take_turns(llm: LLM, expected: list[list[tuple[int, ...]]]) -> None:
    streams = [llm.stream([PROMPTS[i]], PARAMS[i]) for i in (1, 3, 5)]
    found = [next(stream) for stream in streams]
    assert answers(llm, 0) == expected[0]  # between their answers
    rest = [next(stream) for stream in streams]
    for i, pair in zip((1, 3, 5), zip(found, rest, strict=True), strict=True):
        assert sorted(x.token_ids for x in pair) == sorted(expected[i])
    del streams


def test_an_abandoned_stream_leaves_the_others_alone(
    llm: LLM, expected: list[list[tuple[int, ...]]]
) -> None:
    stream = llm.stream([PROMPTS[1]] * 5, SamplingParams(temperature=0, max_tokens=60, n=2))
    waiting = threading.Thread(target=next, args=(stream, None))
    waiting.start()
    assert answers(llm, 2) == expected[2]
    waiting.join()
    stream.close()  # type: ignore[attr-defined]
    assert answers(llm, 4) == expected[4]
    assert llm.blocks.used("device") == 0


def test_an_interrupted_caller_leaves_the_others_alone(
    llm: LLM, expected: list[list[tuple[int, ...]]]
) -> None:
    """The thread that computes is stopped in the middle of a round for two."""
    stopped = []

    def caller(number: int) -> list[tuple[int, ...]] | None:
        both.wait()
        try:
            return answers(llm, number)
        except KeyboardInterrupt:
            stopped.append(number)
            return None

    def stop() -> None:
        raise KeyboardInterrupt

    both = threading.Barrier(2)
    in_round(llm, stop, after=4)
    with ThreadPoolExecutor(2) as pool:
        found = dict(zip((6, 13), pool.map(caller, (6, 13)), strict=True))
    assert len(stopped) == 1
    (other,) = {6, 13} - set(stopped)
    assert found[other] == expected[other]
    assert llm.blocks.used("device") == 0


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_an_interrupt_while_prompts_get_their_places_loses_none(
    number: int, llm: LLM, expected: list[list[tuple[int, ...]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    adds = iter(range(1, 1000))
    add = BatchSlots.add

    def interrupted(self: BatchSlots, sequence: Sequence) -> None:
        if next(adds) == number:
            raise KeyboardInterrupt
        add(self, sequence)

    monkeypatch.setattr(BatchSlots, "add", interrupted)
    both = threading.Barrier(2)

    def caller(prompt: int) -> list[tuple[int, ...]] | None:
        both.wait()
        try:
            return answers(llm, prompt)
        except KeyboardInterrupt:
            return None

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(caller, (1, 3)))  # of two answers each
    assert found.count(None) == 1
    assert found[0] in (None, expected[1])
    assert found[1] in (None, expected[3])


def test_answers_that_wait_for_one_prompt_begin_again_together(llm: LLM) -> None:
    """Two prompts in two batches of three, interrupted before they are read."""

    def stop() -> None:
        raise KeyboardInterrupt

    params, prompts, call = SamplingParams(n=2, max_tokens=3, ignore_eos=True), PROMPTS[:2], Call()
    llm.submit(prompts, params, call)
    in_round(llm, stop)
    with pytest.raises(KeyboardInterrupt):
        llm.work(lambda: bool(call.done))
    assert not call.done
    llm.work(lambda: len(call.done) == 4 or len(llm.rounds) > 20)
    assert sorted((one.index, one.sample) for one in call.done) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert llm.blocks.used("device") == 0


def test_answers_that_are_done_come_before_the_error_of_a_later_round(llm: LLM) -> None:
    def fail() -> None:
        raise DiskReadError("the disk died")

    short, long = (SamplingParams(max_tokens=n, ignore_eos=True) for n in (2, 50))
    stream = llm.stream([PROMPTS[0], PROMPTS[1]], [short, long])
    in_round(llm, fail, after=6)
    assert next(stream).finish_reason == "length"
    with pytest.raises(DiskReadError, match="died"):
        next(stream)


def test_a_closed_llm_holds_no_caches_and_no_weights(checkpoint: Path) -> None:
    pages = KeptPages()
    llm = LLM(checkpoint, PLAN, _instrumentation=Instrumentation(pages=pages))
    llm.generate([PROMPTS[0]], PARAMS[0])
    cache = weakref.ref(llm._rounds._places.batches[0].cache)
    assert pages.nbytes > llm.residency.device_bytes
    llm.close()
    gc.collect()
    assert cache() is None
    assert not pages.nbytes
    with pytest.raises(ArgumentError, match="this LLM is closed"):
        _ = llm.runtime


def test_what_fails_in_a_round_is_raised_in_all_its_callers(
    llm: LLM, expected: list[list[tuple[int, ...]]]
) -> None:
    def fail() -> None:
        raise DiskReadError("the disk died")

    both = threading.Barrier(2)

    def caller(number: int) -> str:
        both.wait()
        try:
            answers(llm, number)
        except DiskReadError as error:
            return str(error)
        return "no error"

    in_round(llm, fail, after=4, running=2)
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(caller, (6, 13))) == ["the disk died"] * 2
    assert answers(llm, 6) == expected[6]


def test_a_cuda_error_ends_all_callers_and_the_llm(checkpoint: Path) -> None:
    def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with LLM(checkpoint, PLAN) as llm:
        in_round(llm, fail, after=4)
        with ThreadPoolExecutor(8) as pool:  # more than have a place
            found = [pool.submit(answers, llm, i) for i in range(8)]
            for one in found:
                with pytest.raises((RuntimeError, ArgumentError), match="an illegal memory access"):
                    one.result()
        with pytest.raises(ArgumentError, match="is closed: CUDA error: an illegal"):
            llm.work(lambda: False)


def test_closing_from_another_thread_ends_all_callers(checkpoint: Path) -> None:
    before = {thread.name for thread in threading.enumerate()}
    llm = LLM(checkpoint, PLAN)
    long = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
    with ThreadPoolExecutor(3) as pool:
        found = [pool.submit(llm.generate, [PROMPTS[i][:9]] * 90, long) for i in range(3)]
        while not llm.rounds:
            time.sleep(0.01)
        llm.close()
        llm.close()
        for one in found:
            with pytest.raises(ArgumentError, match="is closed"):
                one.result()
    with pytest.raises(ArgumentError, match="is closed"):
        llm.generate([[5]])
    left = {thread.name for thread in threading.enumerate()} - before
    assert not [name for name in left if not name.startswith(("qoff-pool", "qoff-cpu"))]


def test_a_daemon_thread_ends_with_the_interpreter_and_says_nothing(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_exit: list[Callable[[], object]] = []
    monkeypatch.setattr(process.atexit, "register", at_exit.append)
    llm = LLM(checkpoint, PLAN)
    ended: list[BaseException | None] = []
    in_a_round = threading.Event()
    in_round(llm, in_a_round.set, running=1)

    def asks_on() -> None:
        try:
            while True:
                answers(llm, 3)
        except ArgumentError as error:
            ended.append(error)

    thread = threading.Thread(target=asks_on, daemon=True)
    thread.start()
    assert in_a_round.wait(20)
    for call in at_exit:
        call()
    rounds = len(llm.rounds)
    assert answers(llm, 0)  # of the main thread, which may have something to do at the exit
    llm._resources.close()  # as finalizers do
    thread.join(0.2)
    assert thread.is_alive()
    assert not ended
    llm.close()
    thread.join(20)
    assert len(ended) == 1
    assert len(llm.rounds) > rounds


def test_a_round_cannot_be_called_or_closed_from_within(llm: LLM) -> None:
    for call in (llm.close, lambda: llm.generate([[5, 6]])):
        in_round(llm, call)
        with pytest.raises(ArgumentError, match="in the middle of its"):
            llm.generate([PROMPTS[0]], PARAMS[0])


def test_a_forked_process_is_told_to_open_its_own(llm: LLM) -> None:
    llm.generate([PROMPTS[0]], PARAMS[0])
    told = in_child(lambda: llm.generate([PROMPTS[1]]))
    assert told.startswith(f"ArgumentError: this LLM was opened by process {os.getpid()}")
