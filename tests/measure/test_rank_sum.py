"""The rank-sum test: what it counts, and how often it is wrong."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qoff.measure.rank_sum import least_p, p_value

few = st.lists(st.integers(0, 5), min_size=1, max_size=5)  # with ties
RUNS = 1500


def by_enumeration(a: list[int], b: list[int]) -> float:
    """p by dealing the values in every way there is."""
    values = [*a, *b]
    ranks = [(sum(v < x for v in values) + sum(v <= x for v in values) + 1) / 2 for x in values]
    found = sum(ranks[: len(a)])
    sums = [sum(chosen) for chosen in combinations(ranks, len(a))]
    sides = sum(s <= found for s in sums), sum(s >= found for s in sums)
    return min(1.0, 2 * min(sides) / len(sums))


@given(few, few)
def test_p_counts_the_ways_to_deal_the_values(a: list[int], b: list[int]) -> None:
    assert math.isclose(p_value(a, b), by_enumeration(a, b))
    assert math.isclose(p_value(a, b), p_value(b, a))


@given(few, few)
def test_only_the_order_counts(a: list[int], b: list[int]) -> None:
    stretched = p_value([math.exp(3 * x) for x in a], [math.exp(3 * x) for x in b])
    assert p_value(a, b) == stretched


@pytest.mark.parametrize(("a", "b"), [(1, 1), (3, 3), (5, 5), (7, 2), (30, 40)])
def test_the_least_p_is_that_of_samples_apart(a: int, b: int) -> None:
    apart = p_value(list(range(a)), list(range(a, a + b)))
    assert math.isclose(apart, least_p(a, b))
    assert p_value([1.0] * a, [1.0] * b) == 1


@pytest.mark.parametrize("size", [5, 9, 20])
@pytest.mark.parametrize("kind", ["normal", "skewed", "far out"])
def test_samples_of_one_kind_are_seldom_found_to_differ(kind: str, size: int) -> None:
    """At p < 0.01 at most 1 % of the time, whatever the distribution; here with room for luck."""
    random = np.random.default_rng(size)
    draw = {
        "normal": lambda: random.normal(100, 1, size),
        "skewed": lambda: random.lognormal(0, 1, size),
        "far out": lambda: random.standard_t(1, size),
    }[kind]
    wrong = sum(p_value(draw(), draw()) < 0.01 for _ in range(RUNS))
    assert wrong / RUNS < 0.02
