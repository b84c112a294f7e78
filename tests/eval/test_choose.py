"""Choices against all there are, on few items."""

from __future__ import annotations

import os
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qoff.eval.mixing import mixing
from qoff.eval.mixing.mixing import choose

OPTIONS = st.tuples(st.integers(1, 60), st.integers(0, 1000).map(float))  # size, cost
ITEMS = st.lists(st.lists(OPTIONS, min_size=1, max_size=4), min_size=1, max_size=5)


def chosen(items: list[list[tuple[int, float]]], limit: float, by: int) -> tuple[float, ...] | None:
    """Size and cost of the choice of least cost within a size (by 0), or the other way round."""
    numbers = [[[option[i] for option in item] for item in items] for i in (0, 1)]
    found = choose(numbers[1 - by], numbers[by], limit)
    if found is None:
        return None
    return tuple(sum(item[i] for item, i in zip(numbers[k], found, strict=True)) for k in (0, 1))


@pytest.mark.parametrize("by", [0, 1])
@given(items=ITEMS, part=st.floats(0, 1))
def test_the_best_choice_within_a_limit(
    by: int, items: list[list[tuple[int, float]]], part: float
) -> None:
    every = [tuple(map(sum, zip(*options, strict=True))) for options in product(*items)]
    limit = int(part * max(all_[by] for all_ in every))
    fitting = [all_[1 - by] for all_ in every if all_[by] <= limit]
    found = chosen(items, limit, by)
    if found is None:
        assert not fitting
        return
    assert found[by] <= limit
    assert found[1 - by] == pytest.approx(min(fitting), rel=1e-4, abs=1e-2)


def test_the_bytes_go_where_they_gain_most() -> None:
    sizes, costs = [[10, 20], [10, 20]], [[5.0, 4.0], [50.0, 4.0]]
    assert choose(costs, sizes, 30) == [0, 1]
    assert choose(sizes, costs, 9.0) == [0, 1]
    assert choose(sizes, costs, 8.0) == [1, 1]
    assert choose(sizes, costs, 7.0) is None
    assert choose(costs, sizes, 19) is None


def test_what_the_solver_prints_is_not_in_the_output(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def talking(*args: object, **options: object) -> object:
        os.write(1, b"HighsMipSolverData::something();\nanother thread's\n")
        return solve(*args, **options)

    solve = mixing.milp
    monkeypatch.setattr(mixing, "milp", talking)
    assert choose([[5.0, 4.0]], [[10, 20]], 30) == [1]
    assert capfd.readouterr().out == "another thread's\n"
