"""Which experts leave a cache first, on routes made up for it."""

from __future__ import annotations

import random

import numpy as np
import pytest

from bench.expert_tiers import simulate_tiers
from qoff.memory.experts.policy import Keys, Lfu, Lru, NextUse
from qoff.memory.experts.simulator import Belady, Routes, rates, simulate

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


def test_layers_keep_about_as_many_each_so_that_no_link_idles() -> None:
    """Of all experts wanted in turn, half of which have room, about half of each layer miss."""
    policy, held, missed = NextUse([16] * 12), set(range(96)), list[int]()
    for layer in [*range(12)] * 8:
        wanted = set(range(16 * layer, 16 * layer + 16))
        policy.use(layer, np.array(sorted(wanted)))
        missed.append(len(wanted - held))
        for key in wanted - held:
            others = np.array(sorted(held - wanted))
            held.remove(int(others[policy.leaving(others, 1)[0]]))
            held.add(key)
    assert sum(missed[-36:]) < 1.15 * 36 * 8
    assert 4 <= min(missed[-36:]) <= max(missed[-36:]) <= 12


def test_a_prompt_pushes_out_nothing_that_is_wanted_often() -> None:
    """Between single tokens, a pass that wants all experts of a layer, however few have room."""
    tokens = skewed(200, chosen=3)
    routes = [
        (layer, list(range(16)) if place // 3 % 20 == 19 else numbers)
        for place, (layer, numbers) in enumerate(tokens)
    ]

    class Eager(NextUse):
        """What a prompt wants counts at once."""

        def _use(self, layer: int, keys: Keys) -> None:
            Lfu._use(self, layer, keys)
            self.at = layer

    found = [simulate(kind(COUNTS), routes, 24, 300) for kind in (NextUse, Eager)]
    assert found[0] > found[1]


def test_shares_of_prompts_grow_where_one_layer_has_experts() -> None:
    policy = NextUse([0, 16, 0])
    for _ in range(9):
        policy.use(1, np.arange(12))
    assert policy.share[:12].min() > policy.share[12:].max()


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
