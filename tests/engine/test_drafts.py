"""Drafted tokens: the same answers in fewer passes."""

from __future__ import annotations

import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from qoff.engine import LLM, Completion, SamplingParams, opened
from qoff.engine.batch import BatchSlots
from qoff.engine.drafts import Acceptance, PromptLookup, continued
from qoff.engine.request import Sequence
from qoff.errors import ArgumentError, BudgetError
from qoff.kvcache import KVQuant, PackedCache
from qoff.kvcache.store.placement import KVPlacement
from qoff.plan import Plan
from tests.module_models import module_checkpoint
from tests.tiny_models import save_tokenizer, tiny_checkpoint

PLAN = Plan(batch_size=3, context=300, kv=KVQuant(window=16))
LOOP = [5, 6, 7, 8, 9] * 20  # prompts and answers that repeat themselves
PROMPTS = [LOOP, LOOP[3:50], [1, 2, 3]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.getbasetemp(), "llama-head64")


@pytest.mark.parametrize(
    ("tokens", "most", "follow"),
    [
        ([1, 2, 3, 4, 1, 2], 3, [3, 4, 1]),
        ([1, 2, 3, 4, 1, 2], 9, [3, 4, 1, 2]),
        ([1, 2, 8, 9, 1, 2, 7, 9, 1, 2], 2, [7, 9]),  # the newest place
        ([3, 1, 2, 8, 8, 5, 1, 2, 7, 7, 3, 1, 2], 2, [8, 8]),  # where more tokens are the same
        ([4, 4, 4, 4, 4, 4, 4], 2, [4, 4]),
        ([1, 2, 3, 9, 3], 2, []),  # a single token says nothing
        ([1, 2, 3], 2, []),
        ([1], 2, []),
    ],
)
def test_what_followed_before_is_proposed(tokens: list[int], most: int, follow: list[int]) -> None:
    assert continued(np.array(tokens, np.int32), most) == follow


def test_drafts_are_as_long_as_they_are_worth() -> None:
    streams, stays, many = ([1 + n * k for k in range(17)] for n in (0.03, 0.2, 0.6))
    accepted = Acceptance()
    assert accepted.length(streams[:5]) == accepted.length(stays[:5]) == 4
    for _ in range(100):
        accepted.note(4, 0)
    assert accepted.length(streams[:5]) == 0  # for some tokens; then one is tried
    assert accepted.length(streams[:5], 8) == 1
    for i in range(100):
        accepted.note(16, 2 + 2 * (i % 3))
    assert [accepted.length(seconds) for seconds in (streams, stays, many)] == [6, 4, 2]
    tiles = [1.0, 2.0, 2.0, 2.0, 2.0, 3.0, 3.0]  # four rows take as long as one
    assert accepted.length(tiles) == 4
    for _ in range(10_000):
        accepted.note(16, 16)
    assert accepted.length(stays) == 16  # what was long ago is forgotten


@pytest.mark.parametrize("drafted", [1, 4])
def test_text_of_which_nothing_comes_again_is_hardly_ever_drafted(drafted: int) -> None:
    """Pauses grow while all drafts are rejected, and end with the first one that is accepted."""
    accepted, tried = Acceptance(), list[int]()
    right = Acceptance()
    for answered in range(0, 20, 2):  # a forecast that is nearly even is no reason for none
        assert right.length([1.0, 2.1], answered) == 1
        right.note(1, 1)
    for answered in range(2000):
        if accepted.length([1.0, 1.1, 1.2, 1.3, 1.4][: drafted + 1], answered):
            accepted.note(drafted, 0)
            tried.append(answered)
    assert len(tried) < 0.02 * 2000
    assert max(b - a for a, b in pairwise(tried)) <= 65
    answered = tried[-1] + 65
    assert accepted.length([1.0, 1.1], answered)
    accepted.note(1, 1)
    assert accepted.length([1.0, 1.1], answered + 2)


def test_right_drafts_that_take_longer_than_they_save_are_rare() -> None:
    """As of mixtures whose tokens need experts of their own."""
    right, tried = Acceptance(), 0
    for answered in range(200):
        if right.length([1.0, 2.4, 3.9], answered):
            right.note(1, 1)
            tried += 1
    assert 0 < tried < 30
    assert right.length([1.0, 1.4, 1.7], 300)
    right.note(1, 1)
    assert right.length([1.0, 1.4, 1.7], 302) == 2  # beside more sequences


def test_a_draft_is_tried_when_something_is_found(checkpoint: Path) -> None:
    """A pause ends with a draft, not with a look that finds nothing."""
    accepted = Acceptance()
    for _ in range(3):
        accepted.note(1, 0)
    seconds = [1.0, 1.5]
    assert [bool(accepted.length(seconds, n)) for n in (1, 8, 9, 10, 11)] == [0, 0, 1, 1, 1]


def test_rejected_drafts_leave_rounds_of_several_steps(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer beside which all drafts are wrong takes few passes more than without any."""
    params = SamplingParams(temperature=0, max_tokens=250, ignore_eos=True)
    with LLM(checkpoint, PLAN, device="cpu") as llm:
        (wanted,) = llm.generate([[1, 2, 3]], params)
    never = next(token for token in range(4, 100) if token not in wanted.token_ids)
    monkeypatch.setattr(opened, "pass_seconds", lambda *_: lambda _: [1.0, 1.2, 1.4])
    monkeypatch.setattr(
        PromptLookup, "propose", lambda _, wanted: {i: [never] * n for i, (_, n) in wanted.items()}
    )
    with LLM(checkpoint, replace(PLAN, draft_tokens=2), device="cpu") as llm:
        (found,) = llm.generate([[1, 2, 3]], params)
        drafts = sum(one.drafts for one in llm.rounds)
        longest = max(one.drafted for one in llm.rounds)
    assert found.token_ids == wanted.token_ids
    assert 0 < drafts <= 9
    assert longest == 2


def answers(llm: LLM, **how: object) -> list[Completion]:
    params = SamplingParams(max_tokens=120, ignore_eos=True, **how)  # type: ignore[arg-type]
    return llm.generate(PROMPTS, params)


@pytest.mark.parametrize(
    "how",
    [
        {"temperature": 0},
        {"temperature": 0, "repetition_penalty": 1.01, "logprobs": 2},
        {"temperature": 0.3, "seed": 5, "n": 2},
    ],
    ids=["likeliest", "penalized", "drawn"],
)
def test_drafts_save_passes_and_change_no_token(how: dict[str, object], checkpoint: Path) -> None:
    with LLM(checkpoint, PLAN) as llm:
        wanted = [(x.token_ids, x.text, x.finish_reason) for x in answers(llm, **how)]
    with LLM(checkpoint, replace(PLAN, draft_tokens=4)) as llm:
        found = answers(llm, **how)
        rounds = list(llm.rounds)
    assert [(x.token_ids, x.text, x.finish_reason) for x in found] == wanted
    assert all(0 <= one.accepted <= one.drafted for one in rounds)
    assert 0 < sum(one.accepted for one in rounds) < sum(one.drafted for one in rounds)
    assert all(sum(one.accepted_at) == one.accepted for one in rounds)
    assert all(all(one.accepted_at) for one in rounds)
    assert all(one.drafts <= one.drafted <= 4 * one.drafts for one in rounds)
    generated = sum(one.generated for one in rounds)
    assert generated == sum(len(x.token_ids) for x in found)


def test_a_continuation_that_is_given_takes_fewer_passes(checkpoint: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=1)
    given = [[11 + i % 50 for i in range(40)]] * len(PROMPTS)
    found, rounds = list[list[float]](), list[int]()
    for drafts in (0, 7):
        with LLM(checkpoint, replace(PLAN, batch_size=6, draft_tokens=drafts)) as llm:
            results = [x for x in llm.stream(PROMPTS, params, given) if x.finish_reason == "given"]
            rounds.append(len(llm.rounds))
        results.sort(key=lambda result: result.index)
        assert [list(x.token_ids) for x in results] == given
        found.append([x.cumulative_logprob or 0.0 for x in results])
    assert found[0] == pytest.approx(found[1], abs=1e-3)
    assert rounds[1] < rounds[0] / 3


@pytest.mark.parametrize(
    "plan",
    [
        replace(PLAN, kv=KVQuant(window=16, sinks=16), draft_tokens=5),
        replace(PLAN, kv=KVQuant(window=0), draft_tokens=5, share_prefixes=True),
        replace(PLAN, kv_placement=KVPlacement(0.3, 0.3), draft_tokens=70),
    ],
    ids=["sinks", "shared", "offloaded"],
)
def test_the_cache_remembers_what_was_accepted_alone(
    plan: Plan, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After every round; what is packed never has to be unpacked for it."""
    rounds = 0

    def forget(batch: BatchSlots) -> None:
        nonlocal rounds
        rounds += 1
        forget_rejected(batch)
        for slot, one in batch._slots.items():
            if one.answer:
                assert batch.cache.lengths[slot] == len(one.prompt) + len(one.answer) - 1

    def unpack(*_: object) -> None:
        raise AssertionError("a block is unpacked")

    forget_rejected = BatchSlots.forget_rejected
    monkeypatch.setattr(BatchSlots, "forget_rejected", forget)
    monkeypatch.setattr(PackedCache, "unpack", unpack)
    with LLM(checkpoint, plan) as llm:
        found = answers(llm, temperature=0, stop_token_ids=[7])
        assert sum(one.accepted for one in llm.rounds) > 0
        assert all(llm.blocks.used(tier) == 0 for tier in ("device", "host", "disk"))
    assert {x.finish_reason for x in found} <= {"length", "stop"}
    assert rounds > 0


@pytest.mark.parametrize("family", ["llama-head64", "llama-head64-deep"])
@pytest.mark.parametrize("how", [{"temperature": 0}, {"temperature": 0.3, "seed": 5, "n": 2}])
def test_a_small_model_drafts_and_changes_no_token(
    family: str,
    how: dict[str, object],
    checkpoint: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    small = tiny_checkpoint(tmp_path_factory.getbasetemp(), family)
    plan = replace(PLAN, prefill_tokens=40, draft_model=str(small), draft_tokens=4)
    params = SamplingParams(max_tokens=40, ignore_eos=True, **how)  # type: ignore[arg-type]
    with LLM(checkpoint, replace(PLAN, prefill_tokens=40), device="cpu") as llm:
        wanted = [x.token_ids for x in llm.generate(PROMPTS * 2, params)]
        without = llm.memory.total("device")
    with LLM(checkpoint, plan, device="cpu") as llm:
        assert [x.token_ids for x in llm.generate(PROMPTS * 2, params)] == wanted
        drafted, accepted = (sum(getattr(one, what) for one in llm.rounds)
                             for what in ("drafted", "accepted"))  # fmt: skip
        counted = llm.memory_by_tier()["device"]["draft model"]
        drafts = llm._rounds.current.opened.drafts
        assert drafts is not None
        assert counted > drafts.executor.runtime.residency.resident_bytes
        assert llm.memory.total("device") > without + counted
        if family == "llama-head64" and how["temperature"] == 0:  # it drafts for itself
            assert accepted > 0.8 * drafted
            assert len(llm.rounds) < 60  # of 80 tokens in each slot, a draft at least in each
    assert drafted > 0


def test_a_small_model_reads_what_is_new_alone(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for an answer that begins again, of which a sliding window has moved on."""
    plan = replace(PLAN, draft_model=str(checkpoint), draft_tokens=4)
    with LLM(checkpoint, plan, device="cpu") as llm:
        llm.generate(PROMPTS[:1], SamplingParams(max_tokens=1))
        opened = llm._rounds.current.opened
        assert opened.drafts is not None
        batch, runtime = opened.drafts.new_batch(128), opened.drafts.executor.runtime
        read, forward = list[int](), runtime.forward
        monkeypatch.setattr(
            runtime, "forward", lambda run: read.append(len(run.tokens)) or forward(run)
        )
        one = Sequence(0, 0, None, tuple(LOOP), SamplingParams(), 20)

        def proposed(*answer: int) -> list[int]:
            one.answer = list(answer)
            read.clear()
            return batch.propose({1: (one, 4)})[1]

        with torch.inference_mode():
            wanted = proposed(5)
            assert read == [101, 1, 1, 1]  # no last one
            other = next(token for token in range(4, 100) if token != wanted[3])
            proposed(5, *wanted[:3], other)
            assert read == [1, 1, 1, 1]
            proposed(5, *wanted[:3], other, wanted[0] + 1)
            assert sum(read) <= 2 + 3
            monkeypatch.setattr(batch._cache, "can_forget", lambda tokens: max(tokens) <= 4)
            proposed(*[9] * 8)
            assert proposed(5) == wanted
            assert read == [101, 1, 1, 1]
    assert len(wanted) == 4


def test_bits_of_layers_that_a_small_model_lacks_are_the_large_ones(
    checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    large = tiny_checkpoint(tmp_path_factory.getbasetemp(), "llama-head64-deep")
    kv = KVQuant(window=16, layers={5: (8, 8)})
    plan = replace(PLAN, kv=kv, draft_model=str(checkpoint), draft_tokens=2)
    with LLM(large, plan, device="cpu") as llm:
        (answer,) = llm.generate([LOOP[:9]], SamplingParams(max_tokens=3, ignore_eos=True))
    assert len(answer.token_ids) == 3


def test_models_that_cannot_draft_are_refused(
    checkpoint: Path, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    base = tmp_path_factory.getbasetemp()
    other = shutil.copytree(tiny_checkpoint(base, "llama-head64"), tmp_path / "other")
    save_tokenizer(other, 100)
    plan = replace(PLAN, draft_tokens=3)
    with pytest.raises(ArgumentError, match="has another tokenizer than the model"):
        LLM(checkpoint, replace(plan, draft_model=str(other)), device="cpu")
    modules = module_checkpoint(base, "bloom")
    with pytest.raises(ArgumentError, match="needs an architecture that qoff computes itself"):
        LLM(checkpoint, replace(plan, draft_model=str(modules)), device="cpu")
    deep = tiny_checkpoint(base, "llama-head64-deep")  # which can stream in whole layers
    with LLM(deep, PLAN, device="cpu") as llm:
        bound = llm.memory.total("device") + llm.runtime.residency.device_bytes // 2
    with pytest.raises(BudgetError, match=r"draft_model .* does not fit"):
        LLM(deep, replace(plan, draft_model=str(deep), device_memory=bound))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"draft_model": "x"}, "draft_model needs draft_tokens"),
        ({"draft_tokens": -1}, "draft_tokens is -1; use a whole number from 0"),
        ({"draft_tokens": 2, "kv": KVQuant(attention_top=0.5)}, "draft_tokens needs attention_top"),
    ],
)
def test_plans_that_cannot_draft_are_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        replace(PLAN, **wrong)  # type: ignore[arg-type]
