"""Samples that take minutes are taken in parts, which join to one result."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import pytest

from bench.experts_peers import Contested
from qoff.errors import ArgumentError


def test_parts_go_on_where_the_one_before_ended(tmp_path: Path) -> None:
    path, taken = tmp_path / "samples.json", list[str]()

    def take(name: str) -> int:
        taken.append(name)
        return len(taken)

    takes = {name: partial(take, name) for name in ("a", "b")}

    def part(left: float) -> bool:
        return Contested({"weights": 1}, path).take(takes, 2, lambda: left)

    assert [part(0), part(0)] == [False, False]  # each takes a sample, whatever it takes
    assert taken == ["a", "b"]
    assert part(60)  # the others are known to fit
    assert taken == ["a", "b", "a", "b"]
    assert Contested({"weights": 1}, path).samples == {"a": [1, 3], "b": [2, 4]}
    with pytest.raises(ArgumentError, match="holds samples of other settings"):
        Contested({"weights": 2}, path)


def test_what_takes_too_long_is_left_to_another_part() -> None:
    found = Contested({})
    assert found.take({"a": lambda: 1}, 1, lambda: math.inf)
    found.seconds["a"] = 300.0
    assert not found.take({"b": lambda: 2, "a": lambda: 1}, 2, lambda: 299.0)
    assert found.samples == {"a": [1], "b": [2, 2]}
