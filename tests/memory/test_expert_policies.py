"""Which experts leave a cache first, on routes made up for it."""

from __future__ import annotations

import random

import pytest

from qoff.memory.experts.policy import Lru, NextUse
from qoff.memory.experts.simulator import Belady, Routes, rates, simulate, simulate_tiers

COUNTS = [16, 0, 16, 16]  # the second layer has none
LAYERS = [0, 2, 3]


def skewed(passes: int, chosen: int = 4) -> Routes:
    """Some experts of each layer are chosen far more often."""
    numbers = random.Random(7)
    weights = [1 / (1 + n) for n in range(16)]
    return [
        (layer, sorted(set(numbers.choices(range(16), weights, k=chosen))))
        for _ in range(passes)
        for layer in LAYERS
    ]


@pytest.mark.parametrize("slots", [4, 16, 30])
def test_nobody_is_better_than_who_knows_what_comes(slots: int) -> None:
    found = {name: some[0] for name, some in rates(COUNTS, skewed(100), [slots], 30).items()}
    bound = found.pop("Belady")
    assert all(rate <= bound for rate in found.values())
    assert found["next use"] > max(found.values()) - 0.01


def test_layers_read_in_turn_keep_what_fits() -> None:
    """Prompts want all experts: the least recently used one is always the one wanted next."""
    routes = [(layer, list(range(16))) for _ in range(5) for layer in LAYERS]
    best = simulate(Belady(COUNTS, routes), routes, 24, 3)
    assert simulate(Lru(COUNTS), routes, 24, 3) == 0
    assert simulate(NextUse(COUNTS), routes, 24, 3) >= 0.6 * best > 0


def test_with_room_for_all_each_is_read_once() -> None:
    routes = skewed(50)
    different = {(layer, n) for layer, numbers in routes for n in numbers}
    wanted = sum(len(numbers) for _, numbers in routes)
    assert simulate(NextUse(COUNTS), routes, 48) == 1 - len(different) / wanted


@pytest.mark.parametrize(("device", "host"), [(6, 12), (12, 12), (12, 24)])
def test_two_tiers_hold_more_when_nothing_is_on_both(device: int, host: int) -> None:
    routes = skewed(100)
    alone = simulate(NextUse(COUNTS), routes, device, 150)
    both = simulate_tiers(NextUse(COUNTS), routes, device, host, exclusive=False, skip=150)
    one = simulate_tiers(NextUse(COUNTS), routes, device, host, skip=150)
    assert one[0] == both[0] == pytest.approx(alone, abs=0.02)
    assert sum(one) > sum(both)
