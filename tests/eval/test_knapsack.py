"""Choices against all there are, on few items, and against the bound that the hull gives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from qoff.eval.knapsack import Option, least_cost, least_size

OPTIONS = st.builds(Option, st.integers(1, 60), st.integers(0, 1000).map(float))
ITEMS = st.lists(st.lists(OPTIONS, min_size=1, max_size=4), min_size=1, max_size=5)


def every(items: Sequence[Sequence[Option]]) -> Iterator[tuple[int, float]]:
    """Size and cost of every choice."""
    for options in product(*items):
        yield sum(o.nbytes for o in options), sum(o.cost for o in options)


def of(items: Sequence[Sequence[Option]], chosen: list[int]) -> tuple[int, float]:
    options = [item[i] for item, i in zip(items, chosen, strict=True)]
    return sum(o.nbytes for o in options), sum(o.cost for o in options)


@given(ITEMS, st.integers(0, 300))
def test_within_the_bytes_and_close_to_the_least_cost(
    items: list[list[Option]], nbytes: int
) -> None:
    fitting = [cost for size, cost in every(items) if size <= nbytes]
    chosen = least_cost(items, nbytes)
    if chosen is None:
        assert not fitting
        return
    size, cost = of(items, chosen)
    assert size <= nbytes
    largest_gain = max(max(o.cost for o in x) - min(o.cost for o in x) for x in items)
    assert cost <= min(fitting) + largest_gain


@given(ITEMS, st.integers(0, 3000).map(float))
def test_within_the_cost_and_close_to_the_least_size(
    items: list[list[Option]], cost: float
) -> None:
    fitting = [size for size, found in every(items) if found <= cost]
    chosen = least_size(items, cost)
    if chosen is None:
        assert not fitting
        return
    size, found = of(items, chosen)
    assert found <= cost
    largest_step = max(max(o.nbytes for o in x) - min(o.nbytes for o in x) for x in items)
    assert size <= min(fitting) + largest_step


@given(st.lists(st.tuples(st.integers(1, 99), st.integers(0, 99)), min_size=1, max_size=6))
def test_more_bytes_never_cost_more(costs: list[tuple[int, int]]) -> None:
    items = [[Option(16, float(low + more)), Option(32, float(low))] for low, more in costs]
    found = [
        of(items, chosen)[1]
        for nbytes in range(0, 32 * len(items) + 8, 8)
        if (chosen := least_cost(items, nbytes)) is not None
    ]
    assert found == sorted(found, reverse=True)
    assert found[-1] == sum(low for low, _ in costs)


def test_the_bytes_go_where_they_gain_most() -> None:
    items = [[Option(10, 5.0), Option(20, 4.0)], [Option(10, 50.0), Option(20, 4.0)]]
    assert least_cost(items, 30) == [0, 1]
    assert least_size(items, 9.0) == [0, 1]
    assert least_size(items, 8.0) == [1, 1]
    assert least_size(items, 7.0) is None
    assert least_cost(items, 19) is None
