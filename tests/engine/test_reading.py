"""Which pieces of prompts a round reads."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest

from qoff.engine import LLM, SamplingParams
from qoff.kvcache import KVQuant
from qoff.plan import Plan

ONE = SamplingParams(temperature=0, max_tokens=1)
KV = KVQuant(window=16)


@pytest.mark.parametrize(
    ("lengths", "batch_size", "reads"),
    [
        pytest.param([60, 30, 20, 14], 4, [60, 64], id="what-fits-together"),
        pytest.param([44, 5, 5, 5, 5], 5, [49, 15], id="no-more-than-there-is-room-for"),
        pytest.param([10, 64, 10, 10], 2, [10, 64, 20], id="the-oldest-first"),
        pytest.param([100, 28, 10], 3, [64, 64, 10], id="the-end-of-a-long-one-with-others"),
    ],
)
def test_prompts_are_read_in_as_few_rounds_as_there_is_room_for(
    checkpoint: Path, lengths: list[int], batch_size: int, reads: list[int]
) -> None:
    plan = Plan(batch_size=batch_size, context=120, prefill_tokens=64, kv=KV)
    with LLM(checkpoint, plan) as llm:
        llm.generate([[5] * length for length in lengths], ONE)
        assert [one.read for one in llm.rounds] == reads


def test_a_prompt_that_is_scored_holds_up_others_for_every_other_round(checkpoint: Path) -> None:
    """It is read 4 tokens at a time, as there are 4 places; those behind it come in between."""
    plan = Plan(batch_size=4, context=120, prefill_tokens=64, kv=KV)
    scored = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    with LLM(checkpoint, plan) as llm:
        llm.generate([[5] * 100, [6] * 100, [7] * 10], [scored, ONE, ONE])
        assert [one.read for one in llm.rounds] == [4, 64, 4, 48, *[4] * 22, 2]


def test_pieces_are_as_large_as_was_decided_when_the_first_plan_was_opened(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decided = Mock(return_value=16)
    monkeypatch.setattr("qoff.engine.opened.prompt_tokens", decided)
    plan = Plan(batch_size=2, context=120, prefill_tokens=64, least_prefill_tokens=8, kv=KV)
    with LLM(checkpoint, plan) as llm:
        llm.generate([[5] * 40], ONE)
        assert [one.read for one in llm.rounds] == [16, 16, 8]
        current = llm._rounds.current
        current.want(plan)
        current.reopen()
        assert current.opened.prompt_tokens == 16
    assert decided.call_count == 1
