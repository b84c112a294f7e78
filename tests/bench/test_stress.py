"""Requests of threads and random plans: a few of each, and a wrong token is found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import random_plans, stress
from qoff.plan import Plan

NEVER = random_plans.Answer((-1,) * 200, (1.0,) * 200)  # no token is this


def counted(main: Any, out: Path, *options: str) -> dict[str, float]:
    """What a bench counts."""
    main(["--seconds", "60", "--seed", "3", "--out", str(out / "x.json"), *options])
    found: dict[str, float] = json.loads((out / "x.json").read_text())["measured"]
    return found


def test_threads_get_the_answers_of_each_prompt_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stress, "_PROMPTS", 8)
    requests = ["--threads", "3", "--requests", "20", "--unshared"]
    found = counted(stress.main, tmp_path, *requests)
    assert found["requests"] == 20
    assert found["compared"] == found["answers"] > 0 == found.get("wrong answers", 0)

    class Other(stress.Requests):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.alone = [[(-1,)]] * len(self.alone)

    monkeypatch.setattr(stress, "Requests", Other)
    with pytest.raises(SystemExit, match="1"):
        counted(stress.main, tmp_path, *requests)


def test_random_plans_change_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_plans, "SHAPES", random_plans.SHAPES[:1])
    found = counted(random_plans.main, tmp_path, "--plans", "6")
    assert found["plans"] == 6
    assert found["opened"] > 0 == found.get("wrong", 0)
    monkeypatch.setattr(random_plans.Trial, "_expected", lambda self, plan: [NEVER] * 20)
    with pytest.raises(SystemExit, match="1"):
        counted(random_plans.main, tmp_path, "--plans", "2")


def test_only_8_bit_activations_may_swap_tokens_that_are_as_likely() -> None:
    answer = random_plans.Answer((5, 6, 7), (1.0, 0.01, 1.0))
    trial = random_plans.Trial(Path(), Path(), 0)
    eight, sixteen = Plan(activation_bits=8), Plan(activation_bits=16)
    for plan, tokens, wrong in (
        (sixteen, (5, 6), False),
        (sixteen, (5, 9), True),
        (eight, (5, 9), False),
        (eight, (9, 6), True),
        (eight, (5,), True),  # too few
    ):
        found = trial._other_tokens(plan, [tokens], [2], [answer])
        assert bool(found) == wrong, (plan.activation_bits, tokens)
    assert trial.counts == {"near ties": 1}
