"""Drafts of what a model is known to answer, wrong here and there."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest

from qoff.engine import LLM, opened
from qoff.engine.drafts import PromptLookup
from qoff.engine.request import Sequence
from qoff.plan.adapt import RunningPlan
from qoff.plan.drafting import PassSeconds


@pytest.fixture
def cheap_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are worth their passes by forecast; a tiny model's are by some machines' alone."""
    forecast = opened.pass_seconds

    def cheap(plan: RunningPlan, drafts: RunningPlan | None) -> PassSeconds:
        assert min(forecast(plan, drafts)(1)) > 0
        return lambda _: [1 + 0.1 * drafted for drafted in range(17)]

    monkeypatch.setattr(opened, "pass_seconds", cheap)


class KnownDrafts(PromptLookup):
    """answers: by prompt. wrong: drafts with a wrong token so far."""

    def __init__(self, answers: Mapping[tuple[int, ...], tuple[int, ...]]) -> None:
        self._answers, self._random = answers, random.Random(3)
        self.wrong = 0

    def propose(self, wanted: Mapping[int, tuple[Sequence, int]]) -> dict[int, list[int]]:
        found = dict[int, list[int]]()
        for slot, (one, most) in wanted.items():
            done = len(one.answer)
            draft = [*self._answers[one.prompt][done : done + self._random.randint(0, most)]]
            if draft and self._random.random() < 0.6:
                at = self._random.randrange(len(draft))
                draft[at] = 3 + (draft[at] - 2) % 25
                self.wrong += 1
            found[slot] = draft
        return found

    def draft_for(self, llm: LLM) -> None:
        """Take the place of what drafts in an engine that has just been opened."""
        for batch in llm._rounds.current.opened.batches:
            batch._proposer = self


def counts(llm: LLM) -> tuple[int, int]:
    """Tokens that were drafted, and those of them that were accepted."""
    rounds = list(llm.rounds)
    return sum(one.drafted for one in rounds), sum(one.accepted for one in rounds)
