"""Which pieces of prompts a round reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from qoff.engine import LLM, SamplingParams
from qoff.engine.pieces import PromptPieces
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


def test_fewer_tokens_are_read_while_answers_are_generated(checkpoint: Path) -> None:
    """The first prompt's answer has its tokens in the first three rounds."""
    plan = Plan(
        batch_size=2, context=120, prefill_tokens=64, mixed_prefill_tokens=16, kv=KV, adapt=False
    )
    three = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    with LLM(checkpoint, plan) as llm:
        llm.generate([[5] * 40, [6] * 100], [three, ONE])
        assert [one.read for one in llm.rounds] == [40, 16, 16, 64, 4]


@pytest.mark.parametrize(
    ("sweep_s", "token_s", "found"),
    [
        pytest.param(1.0, 0.0, 1000, id="rounds-wait-for-weights-alone"),
        pytest.param(1.0, 1 / 200, 256, id="up-to-where-computing-takes-longer"),
        pytest.param(0.1, 1 / 10, 64, id="computing-is-what-takes-time"),
    ],
)
def test_pieces_grow_while_rounds_hardly_do(sweep_s: float, token_s: float, found: int) -> None:
    pieces = PromptPieces(1000, 64)
    assert pieces.tokens(answers=False) == 1000
    sizes = list[int]()
    for number in range(2000):
        sizes.append(pieces.tokens(answers=True))
        held_up = 50.0 if number % 20 == 19 else 0.0
        seconds = max(sweep_s, token_s * sizes[-1]) + held_up
        pieces.note(sizes[-1], 2 * sizes[-1], 2, seconds)
    assert sizes[12:32].count(found) == 20
    assert sizes.count(found) > 0.93 * len(sizes)


def test_pieces_follow_when_what_a_round_takes_changes() -> None:
    pieces = PromptPieces(1000, 64)
    for token_s, found in ((0.0, 1000), (1 / 10, 64), (0.0, 1000)):
        sizes = list[int]()
        for _ in range(3000):
            sizes.append(pieces.tokens(answers=True))
            pieces.note(sizes[-1], sizes[-1], 1, max(1.0, token_s * sizes[-1]))
        assert sizes[-300:].count(found) > 0.9 * 300


def test_pieces_stay_as_they_are_where_a_round_tells_nothing_of_them() -> None:
    pieces = PromptPieces(1024, 64)
    pieces.note(64, 0, 0, 1.0)  # no prompt
    pieces.note(64, 20, 1, 1.0)  # the end of one
    assert pieces.tokens(answers=True) == 64
    assert PromptPieces(32, 64).tokens(answers=True) == 32
    assert PromptPieces(32).tokens(answers=True) == 32
