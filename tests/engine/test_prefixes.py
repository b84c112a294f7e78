"""Prompts that begin alike, or as what was answered before, share packed blocks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from qoff.engine import LLM, SamplingParams
from qoff.engine.calls import Call
from qoff.errors import ArgumentError
from qoff.kvcache import KVQuant
from qoff.plan import Plan
from tests.instruments import POISON

DRAW = Random(4)
TOKENS = [DRAW.randrange(4, 128) for _ in range(200)]
QUANT = KVQuant(window=16)
CONTEXT = 300


def test_prompts_that_begin_alike_share_blocks(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [[*TOKENS[:160], *tail] for tail in ([7, 8, 9], [9], [], [100] * 30)]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    plan = Plan(batch_size=2, batches=2, context=CONTEXT, kv=QUANT, share_prefixes=True)
    with LLM(checkpoint, plan, _instrumentation=POISON) as llm:
        taken = []
        allocate = llm.blocks.allocate
        monkeypatch.setattr(
            llm.blocks,
            "allocate",
            lambda indices, *rest: taken.extend(indices) or allocate(indices, *rest),
        )
        found = llm.generate(prompts, params)
        assert taken == [0, 1, 2]  # the third is of the longest sequence alone
        assert sum(r.read for r in llm.rounds) == 163 + 33 + 32 + 62
        assert llm.blocks.used("device") == 0
        (index,) = {one._prefixes for one in llm._rounds.current.opened.batches}
        assert index is not None
        assert not index.find(prompts[0], 3)  # nor of blocks that were wiped
        (alone,) = llm.generate(prompts[:1], params)
        again = llm.generate(prompts[1:], params)
    assert found[0].token_ids == alone.token_ids
    assert [len(r.token_ids) for r in (*found, *again)] == [20] * 7


def test_prompts_begin_with_what_was_read_and_answered_before(checkpoint: Path) -> None:
    """Until other tokens come into the blocks, of the place that was emptied first."""
    plan = Plan(batch_size=2, context=CONTEXT, kv=KVQuant(8, 8, window=0), share_prefixes=True)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)

    def read(prompt: list[int]) -> int:
        before = sum(one.read for one in llm.rounds)
        answers[tuple(prompt)] = llm.generate([prompt], params)[0].token_ids
        return sum(one.read for one in llm.rounds) - before

    answers = dict[tuple[int, ...], tuple[int, ...]]()
    first, other, third = TOKENS[:100], TOKENS[10:110], TOKENS[20:120]
    with LLM(checkpoint, plan) as llm:
        assert read(first) == 100
        turn = [*first, *answers[tuple(first)], 7, 8, 9]
        assert read(other) == 100
        assert read(turn) == 143 - 128
        assert read(third) == 100  # in the place of `other`
        assert read(first) == 100 - 64
        assert read(other) == 100
        assert llm.kv_used == 0
        found = dict(answers)
    with LLM(checkpoint, plan) as llm:
        for prompt in (first, turn):
            read(prompt)
            assert answers[tuple(prompt)] == found[tuple(prompt)]


def test_prefixes_that_end_where_pieces_of_prompts_do_change_no_bit(checkpoint: Path) -> None:
    """Without tokens in floats, what a piece attends to is packed with and without sharing."""
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=0)
    plan = Plan(batch_size=2, context=CONTEXT, kv=KVQuant(window=0), prefill_tokens=64)
    prompts, found, read = [TOKENS[:170], [*TOKENS[:150], 7, 8]], [], []
    for share in (False, True):
        with LLM(checkpoint, replace(plan, share_prefixes=share)) as llm:
            answers = [llm.generate([prompt], params)[0] for prompt in prompts]
            found.append([(one.token_ids, one.logprobs) for one in answers])
            read.append(sum(one.read for one in llm.rounds))
            assert [sum(getattr(one, n) for one in llm.rounds) for n in ("queried", "shared")] == (
                [170 + 152, 128] if share else [0, 0]
            )
    assert found[0] == found[1]
    assert read == [170 + 152, 170 + 24]


def test_no_prompt_waits_for_one_in_the_background_that_begins_alike(checkpoint: Path) -> None:
    plan = Plan(batch_size=2, context=CONTEXT, prefill_tokens=64, share_prefixes=True)
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    later, sooner = Call(), Call()
    later.background = True
    with LLM(checkpoint, replace(plan, kv=KVQuant(window=0))) as llm:
        llm.submit([TOKENS], params, later)
        llm.work(lambda: bool(llm.rounds))
        llm.submit([[*TOKENS[:90], 7]], params, sooner)
        llm.work(lambda: bool(sooner.done))
        assert not later.done
        assert sum(one.read for one in llm.rounds) == 64 + 91  # of one, and all of the other
        llm.work(lambda: bool(later.done))


def test_after_an_error_nothing_is_known(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks may never have got what they should have."""
    plan = Plan(batch_size=1, context=CONTEXT, kv=QUANT, share_prefixes=True)
    params = SamplingParams(temperature=0, max_tokens=2)
    with LLM(checkpoint, plan) as llm:
        llm.generate([TOKENS], params)
        with monkeypatch.context() as fails:
            fails.setattr(llm._rounds, "_compute", lambda: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                llm.generate([TOKENS[:5]], params)
        before = sum(one.read for one in llm.rounds)
        llm.generate([TOKENS], params)
        assert sum(one.read for one in llm.rounds) - before == len(TOKENS)


def test_sink_tokens_are_not_shared() -> None:
    with pytest.raises(ArgumentError, match="share_prefixes needs sinks=0"):
        Plan(share_prefixes=True, kv=KVQuant(sinks=16))
