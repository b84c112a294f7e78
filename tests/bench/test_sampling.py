"""Samples: taken in turn, on a machine that others use, and what is said of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

import pytest
import torch

from bench.sampling import interleaved, timed, torch_threads
from qoff.measure.samples import Samples


def test_alternatives_are_sampled_in_turn_and_each_goes_first() -> None:
    calls: list[str] = []

    def alternative(name: str) -> Callable[[], float]:
        def call() -> float:
            calls.append(name)
            return float(len(calls))

        return call

    found = interleaved({n: alternative(n) for n in "ab"}, rounds=4, pause=0, foreign=lambda: 0.0)
    assert "".join(calls) == "abbaabba"
    assert found["a"].values == (1.0, 4.0, 5.0, 8.0)


def test_rounds_that_others_disturb_are_repeated() -> None:
    numbers = iter([50.0, 1.0, 51.0, 2.0, 3.0])
    taken = iter([0, 9e9, 9e9, 9e9, 9e9, 18e9, 18e9, 18e9, 18e9, 18e9])
    found = interleaved({"a": lambda: next(numbers)}, 3, pause=0, foreign=lambda: next(taken))
    assert sorted(found["a"].values) == [1.0, 2.0, 3.0]


def test_rounds_end_where_others_never_rest() -> None:
    numbers, taken = iter(range(100)), iter(range(10**9, 10**12, 10**9))
    found = interleaved(
        {"a": lambda: float(next(numbers))}, 3, pause=0, foreign=lambda: float(next(taken))
    )
    assert len(found["a"].values) == 3
    assert next(numbers) == 6


@pytest.mark.parametrize(
    ("values", "median", "spread"),
    [((2.0,), 2.0, 0.0), ((1.0, 2.0, 5.0), 2.0, 2.0), ((1.0, 2.0, 3.0, 4.0, 99.0), 3.0, 2 / 3)],
)
def test_an_outlier_moves_neither_median_nor_spread(
    values: tuple[float, ...], median: float, spread: float
) -> None:
    samples = Samples(values)
    assert samples.median == median
    assert math.isclose(samples.spread, spread)


def test_a_timed_call_is_repeated_until_it_lasts() -> None:
    calls: list[int] = []
    measure = timed(lambda: calls.append(1), least_s=0.001)
    before = len(calls)
    assert measure() > 0
    assert len(calls) - before > 2


def test_torch_gets_its_threads_back() -> None:
    before = torch.get_num_threads()
    inside = []

    def fail() -> None:
        with torch_threads(before + 1):
            inside.append(torch.get_num_threads())
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert inside == [before + 1]
    assert torch.get_num_threads() == before


def test_one_value_has_no_deviation() -> None:
    assert Samples((3.0,)).sd == 0
    values = (1.0, 2.0, 4.5)
    assert math.isclose(Samples(values).sd, statistics.stdev(values))
    assert Samples(values).mean == 2.5
