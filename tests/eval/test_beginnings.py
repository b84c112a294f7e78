"""Sequences that begin alike are read from there, with the scores that they have apart."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qoff.eval.tasks.beginnings import Group, common_tokens, groups
from qoff.eval.tasks.harness import QoffLM
from qoff.eval.tasks.once import Size, size_of
from qoff.models.forward_pass import ForwardPass
from qoff.models.native.decoder import Decoder
from tests.tiny_models import load_budgets, tiny_checkpoint

_SHORT = st.lists(st.integers(0, 1), min_size=1, max_size=40).map(tuple)
DRAW = Random(3)
QUESTIONS = [[DRAW.randrange(4, 60) for _ in range(30)] for _ in range(3)]
ENDS = [[8, 9], [8, 10, 11, 12], [8, 9, 13], [5] * 9, [70]]
REQUESTS: list[tuple[None, list[int], list[int]]] = [
    *((None, question, end) for question in QUESTIONS for end in ENDS),
    (None, QUESTIONS[0][:12], [7, 7, 7]),
    (None, QUESTIONS[0], QUESTIONS[1]),
    (None, [6], [7]),
]


def _never(_: object) -> bool:
    return False


@given(st.sets(_SHORT, min_size=1, max_size=12), st.integers(0, 30))
def test_groups_read_what_is_shared_once(found: set[tuple[int, ...]], length: int) -> None:
    sequences = sorted((0,) * length + sequence for sequence in found)
    lengths = [len(one) for one in sequences]
    parts = groups(lengths, common_tokens(sequences))
    assert [i for part in parts for i in range(part.first, part.stop)] == [*range(len(sequences))]
    for shared, first, stop in parts:
        assert (stop - first == 1) == (shared == 0)
        if shared:
            some = sequences[first:stop]
            assert len({one[:shared] for one in some}) == 1
            assert min(map(len, some)) > shared
            assert shared * (stop - first - 1) >= 8


def test_the_fewest_tokens_are_read() -> None:
    shots, question = list(range(200)), [7] * 20
    sequences = sorted([[*shots, i, *question, *range(n)] for i in range(3) for n in (1, 2, 4)])
    lengths, common = [len(one) for one in sequences], common_tokens(sequences)
    assert groups(lengths, common) == [Group(200, 0, 9)]
    assert groups(lengths[:3], common[:3]) == [Group(221, 0, 3)]
    apart = [[i, *question, *range(n)] for i in range(3) for n in (1, 2, 4)]
    lengths, common = [len(one) for one in apart], common_tokens(apart)
    assert groups(lengths, common) == [Group(21, 0, 3), Group(21, 3, 6), Group(21, 6, 9)]
    assert groups([1, 2, 3], [0, 1, 2]) == [Group(0, 0, 1), Group(0, 1, 2), Group(0, 2, 3)]


def test_a_pass_without_wanted_rows_makes_one() -> None:
    assert size_of([Group(20, 0, 2)], [30, 30], [25, 25]) == Size(40, 6 + 6 + 1, 2, 30)
    assert size_of([Group(20, 0, 2)], [30, 30], [16, 25]) == Size(40, 5 + 10 + 6, 2, 30)
    assert size_of([Group(0, 0, 1)], [30], [25]) == Size(30, 6, 1, 30)  # no second pass


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        "mistral-window",
        "gemma2",
        "opt",
        "mixtral",
        "deepseek-v3",
        "glm-5",
        "qwen3-next",
        "kimi-linear",
        "ling3",
        "gemma4",
    ],
)
def test_scores_are_those_of_sequences_apart(
    family: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = tiny_checkpoint(tmp_path_factory.getbasetemp(), family)
    least, _ = load_budgets(checkpoint, batch_size=2)

    def scored(memory: int | None, batch_size: int = 2) -> list[tuple[float, bool]]:
        lm = QoffLM(str(checkpoint), batch_size=batch_size, device_memory=memory)
        return lm._loglikelihood_tokens(REQUESTS, True)

    found = scored(None, 8)
    assert scored(least) == found  # whatever is read together
    for name, value in (("beginnings._WORTH", 10**9), ("continuations.can_read_once", _never)):
        monkeypatch.setattr(f"qoff.eval.tasks.{name}", value)
        apart = scored(None)
        assert [greedy for _, greedy in apart] == [greedy for _, greedy in found]
        assert [x for x, _ in apart] == pytest.approx([x for x, _ in found], rel=1e-5)


def test_a_question_is_read_once_for_its_answers(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm, passes = QoffLM(str(checkpoint)), list[int]()
    begin = Decoder.begin

    def noted(decoder: Decoder, run: ForwardPass) -> Any:
        passes.append(run.ragged.tokens)
        return begin(decoder, run)

    monkeypatch.setattr(Decoder, "begin", noted)
    lm._loglikelihood_tokens(REQUESTS[: len(ENDS)], True)
    assert passes == [29, 1 + 9 + 2 + 3 + 4]  # the last of the question is an answer's context
