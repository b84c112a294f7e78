"""Submitted prompts: answered by threads in `work`, told of after each round, cancelled."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from qoff.engine import LLM, Completion, SamplingParams
from qoff.engine.calls import Call
from qoff.engine.request import Sequence
from qoff.errors import ArgumentError, FormatError
from qoff.plan import Plan
from tests.tiny_models import tiny_checkpoint

PLAN = Plan(batch_size=2, batches=2, context=150)
PARAMS = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


class Listener(Call):
    """Notes how many tokens there were at each call."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.lengths: dict[tuple[int, int], list[int]] = {}
        self.over = threading.Event()
        self._count = count

    def grew(self, sequence: Sequence, answer: Completion | None) -> None:
        super().grew(sequence, answer)
        key = (sequence.index, sequence.sample)
        self.lengths.setdefault(key, []).append(len(sequence.answer))
        if len(self.done) == self._count:
            self.over.set()

    def failed(self, error: BaseException) -> None:
        super().failed(error)
        self.over.set()


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with LLM(tiny_checkpoint(tmp_path_factory.getbasetemp(), "llama-head64"), PLAN) as llm:
        yield llm


@contextmanager
def working(llm: LLM, threads: int = 1) -> Iterator[None]:
    stopped = threading.Event()
    workers = [threading.Thread(target=llm.work, args=(stopped.is_set,)) for _ in range(threads)]
    for worker in workers:
        worker.start()
    try:
        yield
    finally:
        stopped.set()
        llm.wake()
        for worker in workers:
            worker.join(10)
            assert not worker.is_alive()


@pytest.mark.parametrize("threads", [1, 2])
def test_submitted_prompts_have_the_answers_of_generate(llm: LLM, threads: int) -> None:
    prompts, params = [[5, 6, 7], [8] * 70, [9, 10]], SamplingParams(**{**vars(PARAMS), "n": 2})
    call = Listener(6)
    with working(llm, threads):
        assert llm.submit(prompts, params, call) == [3, 70, 2]
        wanted = llm.generate(prompts, params)  # beside it
        assert call.over.wait(30)
    found = sorted(call.done, key=lambda one: (one.index, one.sample))
    assert [one.token_ids for one in found] == [one.token_ids for one in wanted]
    for lengths in call.lengths.values():
        assert lengths == sorted(lengths)
        assert set(range(1, 21)) <= set(lengths)  # none is skipped
    assert llm.kv_used == 0


def test_what_is_cancelled_gives_up_its_places_within_a_round(llm: LLM) -> None:
    first, second = Listener(4), Listener(1)
    many = SamplingParams(temperature=0, max_tokens=140, ignore_eos=True, n=2)
    with working(llm):
        llm.submit([[5], [6]], many, first)
        llm.submit([7], PARAMS, second)
        assert llm.waiting in (1, 5)
        while len(first.lengths) < 4:
            pass
        before = llm.rounds[-1].number
        llm.cancel(first)
        assert second.over.wait(30)
    assert llm.rounds[-1].number - before < 20 + 4
    assert len(second.done[0].token_ids) == 20
    assert not first.done
    assert (llm.waiting, llm.kv_used) == (0, 0)


def test_a_waiting_prompt_can_be_cancelled(llm: LLM) -> None:
    call = Listener(1)
    llm.submit([5], PARAMS, call)  # nobody works
    assert llm.waiting == 1
    llm.cancel(call)
    assert llm.waiting == 0


def test_none_of_a_request_is_taken_where_one_prompt_is_wrong(llm: LLM) -> None:
    with pytest.raises(ArgumentError, match="no tokens"):
        llm.submit([[5], []], PARAMS, Listener(2))
    assert llm.waiting == 0


def test_a_round_that_fails_is_told(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(passes: object) -> None:
        raise FormatError("broken")

    call = Listener(1)
    with working(llm):
        with monkeypatch.context() as patch:
            patch.setattr(llm._rounds._schedule, "round", fail)
            llm.submit([5], PARAMS, call)
            assert call.over.wait(30)
        assert isinstance(call.error, FormatError)
        other = Listener(1)
        llm.submit([5], PARAMS, other)
        assert other.over.wait(30)
    assert len(other.done) == 1
