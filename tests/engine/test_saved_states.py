"""Recurrent states that are kept behind blocks of prompts, for prompts that begin alike."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch

from qoff.engine import LLM, SamplingParams
from qoff.engine.calls import Call
from qoff.kernels.layout.delta import DeltaShape
from qoff.kvcache import KVQuant
from qoff.kvcache.saved_states import SavedStates
from qoff.kvcache.states import StateCache
from qoff.plan import Plan
from tests.tiny_models import tiny_checkpoint

DRAW = Random(4)
TOKENS = [DRAW.randrange(4, 128) for _ in range(200)]
# Without tokens in floats, what a piece attends to is packed with and without sharing.
PLAN = Plan(batch_size=2, context=400, kv=KVQuant(window=0), prefill_tokens=64)
PARAMS = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=0)
SHAPE = DeltaShape(1, 1, 16, 16, 2)


@pytest.fixture(
    scope="module",
    params=["qwen3-next-head64", "kimi-linear", "ling3", "olmo-hybrid", "lfm2", "falcon-h1"],
)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.getbasetemp(), request.param)


def counted(llm: LLM, name: str = "read") -> int:
    return sum(getattr(one, name) for one in llm.rounds)


def test_conversations_go_on_and_no_bit_changes(checkpoint: Path) -> None:
    """The second prompt begins as the first, the third goes on with it and its answer."""
    found, read = [], []
    for share in (False, True):
        with LLM(checkpoint, replace(PLAN, share_prefixes=share)) as llm:
            answers = [llm.generate([TOKENS[:170]], PARAMS)[0]]
            following = [*TOKENS[:170], *answers[0].token_ids, 7, 8, 9]
            for prompt in ([*TOKENS[:150], 7, 8], following, following):
                answers.append(llm.generate([prompt], PARAMS)[0])
            found.append([(one.token_ids, one.logprobs) for one in answers])
            read.append(counted(llm))
            shared = counted(llm, "shared")
    assert found[0] == found[1]
    # Of the answer's turn a third block is packed, which the last prompt begins with.
    assert read == [170 + 152 + 193 + 193, 170 + 24 + 65 + 1]
    assert shared == 128 + 128 + 192


def test_what_several_prompts_begin_with_is_read_once(checkpoint: Path) -> None:
    """The first one keeps its states where the others begin to differ, as they wait for it."""
    prompts = [[*TOKENS[:140], *tail] for tail in (TOKENS[:100], [7] * 90, [8] * 20, [9])]
    plan = replace(PLAN, batch_size=4, share_prefixes=True)
    with LLM(checkpoint, plan) as llm:
        found = llm.generate(prompts, PARAMS)
        assert counted(llm) == 240 + 102 + 32 + 13
        assert llm.kv_used == 0
    with LLM(checkpoint, replace(plan, share_prefixes=False)) as llm:
        alone = [llm.generate([prompt], PARAMS)[0] for prompt in prompts]
    assert [one.token_ids for one in found] == [one.token_ids for one in alone]


@pytest.mark.parametrize("batch_size", [PLAN.batch_size, 1])
def test_a_beginning_that_is_used_again_is_kept_where_it_ends(
    batch_size: int, checkpoint: Path
) -> None:
    """The second prompt finds blocks, but no states behind them; later ones find those of it.

    One sequence at a time, too, though each prompt keeps states of its own.
    """
    prompts = [[*TOKENS[:70], *[tail] * 130] for tail in (7, 8, 9, 10)]
    with LLM(checkpoint, replace(PLAN, batch_size=batch_size, share_prefixes=True)) as llm:
        read = []
        for prompt in prompts:
            before = counted(llm)
            llm.generate([prompt], PARAMS)
            read.append(counted(llm) - before)
    assert read == [200, 200, 136, 136]


def test_no_prompt_waits_for_one_that_has_read_past_what_they_share(checkpoint: Path) -> None:
    """Nor for one that does not read itself: the first answer of several reads for all."""
    first, second = Call(), Call()
    with LLM(checkpoint, replace(PLAN, batch_size=3, share_prefixes=True)) as llm:
        llm.submit([TOKENS], PARAMS, first)
        llm.work(lambda: len(llm.rounds) > 1)
        llm.submit([[*TOKENS[:64], 5, 6, 7]], replace(PARAMS, max_tokens=1), second)
        llm.work(lambda: bool(second.done))
        assert not first.done
        llm.work(lambda: bool(first.done))
        answers = llm.generate([[*TOKENS[:90], 5]], replace(PARAMS, n=2))
        assert len(answers) == 2


def test_states_that_a_pass_left_half_way_are_no_obstacle(checkpoint: Path) -> None:
    """Once no sequence has any, others begin with states that are kept."""
    plan = replace(PLAN, batch_size=1, batches=2, share_prefixes=True)
    with LLM(checkpoint, plan) as llm:
        for batch in llm._rounds.current.opened.batches:
            batch.cache.states.spoiled = True  # type: ignore[attr-defined]
        llm.generate([[*TOKENS[:100], 7], [*TOKENS[:100], 8]], PARAMS)
        assert counted(llm, "shared") == 64


def test_kept_states_are_counted(checkpoint: Path) -> None:
    with LLM(checkpoint, replace(PLAN, share_prefixes=True)) as llm:
        (batch,) = llm._rounds.current.opened.batches
        saved = batch._saved_states
        assert saved is not None
        own = batch.cache.states.nbytes  # type: ignore[attr-defined]
        assert llm.memory.purposes["device"]["states"] == saved.nbytes + own
        assert saved.nbytes == own * 3 / 2  # one more than there are sequences


def test_after_an_error_no_states_are_known(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(checkpoint, replace(PLAN, share_prefixes=True)) as llm:
        llm.generate([TOKENS], PARAMS)
        with monkeypatch.context() as fails:
            fails.setattr(llm._rounds, "_compute", lambda: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                llm.generate([TOKENS[:5]], PARAMS)
        before = counted(llm)
        llm.generate([TOKENS], PARAMS)
        assert counted(llm) - before == len(TOKENS)


def test_those_used_last_are_kept_each_with_its_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    states, saved = StateCache([SHAPE, SHAPE], 2), SavedStates([SHAPE, SHAPE], 2)
    parts = (*states.conv, *states.memory)

    def save(value: float, tokens: list[int], adapter: int = -1) -> None:
        for number, part in enumerate(parts):
            part[0] = value + number
        saved.save(tokens, adapter, states, 0)

    def load(tokens: list[int], adapter: int = -1, most: int = 9) -> tuple[int, list[float]]:
        found = saved.load(tokens, adapter, most, states, 1)
        return found, [float(part[1].min()) for part in parts]

    save(1.0, TOKENS[:64])
    save(2.0, TOKENS[:128])
    assert load(TOKENS[:127]) == (1, [1, 2, 3, 4])
    assert load(TOKENS) == (2, [2, 3, 4, 5])
    assert load(TOKENS, most=1) == (1, [1, 2, 3, 4])
    assert load(TOKENS, adapter=0)[0] == 0
    save(3.0, TOKENS[:64], adapter=0)  # in the place of the two blocks
    assert load(TOKENS) == (1, [1, 2, 3, 4])
    assert load(TOKENS, adapter=0) == (1, [3, 4, 5, 6])
    assert load(TOKENS[1:])[0] == load(TOKENS[:63])[0] == 0
    with monkeypatch.context() as fails:  # what is interrupted costs no place
        fails.setattr(states, "save", lambda *_: 1 / 0)
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                save(4.0, TOKENS[64:128])
            saved.clear()
    assert load(TOKENS)[0] == 0
    save(5.0, TOKENS[:64])
    assert load(TOKENS)[0] == 1
    saved.clear()
    assert load(TOKENS)[0] == 0
    assert torch.equal(parts[0][1], torch.full_like(parts[0][1], 5.0))  # as it was before
