"""The bench of experts runs, compares the same computations, and writes what it says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

from bench import experts
from qoff.errors import QoffError

SMALL = experts.Shape("small", 6, 2, 128, 64)
NAME = "small, 2 of 6"


def test_the_bench_writes_what_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "QUICK_SHAPES", (SMALL,))
    experts.main(["--quick", "--out", str(tmp_path / "out.json")])
    content = json.loads((tmp_path / "out.json").read_text())
    assert set(content["measured"]) == {f"{NAME} M=1", f"{NAME} M=16"}
    gate_up, down = experts.random_experts(SMALL)
    single = content["measured"][f"{NAME} M=1"]
    assert single["weight_bytes"] == 2 * (gate_up.expert(0).nbytes + down.expert(0).nbytes)
    assert single["eta"] > 0
    assert content["ratios"][f"{NAME} M=16"][experts.LOOP] > 0


def test_draws_are_of_different_experts_and_use_all() -> None:
    draws = experts.Operands(SMALL).draws(3)
    chosen = [row for numbers, _ in draws for row in numbers.tolist()]
    assert all(len(set(row)) == SMALL.per_token for row in chosen)
    assert {e for row in chosen for e in row} == set(range(SMALL.experts))


def test_nothing_is_measured_of_alternatives_that_differ() -> None:
    class Wrong(experts.Operands):
        def calls(self, tokens: int) -> dict[str, Callable[[], Tensor]]:
            calls = super().calls(tokens)
            return {**calls, experts.LOOP: lambda: 1.1 * calls[experts.LOOP]()}

    with pytest.raises(QoffError, match="nothing measured"):
        experts.check(Wrong(SMALL))
