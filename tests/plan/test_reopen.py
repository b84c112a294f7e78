"""Another plan in the same memory: what it may take, and whether it pays."""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch

from qoff.engine.simulated.executor import open_simulated
from qoff.engine.simulated.machine import VirtualMachine
from qoff.errors import BudgetError
from qoff.kvcache import KVQuant
from qoff.kvcache.store.placement import KVPlacement
from qoff.memory.io.virtual import VirtualClock
from qoff.plan import Plan
from qoff.plan.adapt import Knobs, Load, Observed, RunningPlan
from qoff.plan.profile import MachineProfile
from qoff.plan.reopen import HORIZON_S, Better, Remaining, better_plan
from tests.plan.machines import MIB, machine, mixture, sizes

PLAN = Plan(
    batch_size=4,
    batches=3,
    context=500,
    prefill_tokens=96,
    schedule="sequential",
    kv=KVQuant(window=16),
    device_memory=18 * MIB,
    kv_placement=KVPlacement(0, 0),
)
KNOBS = Knobs("sequential", 3, 3)
LEFT = Remaining([20.0] * 12, 100, 0, 300.0, 50.0)


def running(plan: Plan = PLAN, profile: MachineProfile | None = None) -> RunningPlan:
    profile = profile or machine()
    with ExitStack() as own:
        there = VirtualMachine(profile, VirtualClock())
        executor = open_simulated(sizes().checkpoint, plan, there, own)
        residency = executor.runtime.residency
        return RunningPlan(sizes(), plan, executor.memory, residency, profile, torch.float32)


def test_a_plan_whose_experts_the_cpu_computes_stays() -> None:
    now = running()
    assert better_plan(now, KNOBS, LEFT) is not None
    now.plan = replace(now.plan, cpu_experts=True)
    assert better_plan(now, KNOBS, LEFT) is None


def test_a_better_plan_takes_no_more_memory_and_cuts_prompts_alike() -> None:
    found = better_plan(running(), KNOBS, LEFT)
    assert found is not None
    assert found.gain > 1.2
    assert (found.plan.context, found.plan.prefill_tokens) == (500, 96)
    now = running(found.plan)
    assert now.memory.total("device") + now.residency.device_bytes <= 18 * MIB
    total = sum(now.memory.total(tier) for tier in ("device", "host"))
    assert total + now.residency.device_bytes + now.residency.host_bytes <= 18 * MIB


@pytest.mark.parametrize("experts", [False, True])
def test_a_link_that_no_round_uses_is_not_fitted(experts: bool) -> None:
    """On a CPU jobs copy, at the rate of memory; experts come over the link."""
    model, now, load = mixture() if experts else sizes(), running(), Load(4, 1, 300)
    now = RunningPlan(model, PLAN, now.memory, now.residency, machine(), torch.float32)
    seconds = now.seconds(load, "block")
    moved = {"disk read": (0.0, 0.0), "to device": (1e7, 1.0)}
    said = now.refit([Observed(load, seconds, seconds, moved)] * 10, "block")
    assert (now.machine.to_device != machine().to_device) == experts
    assert any("to device" in one for one in said) == experts


def test_where_nothing_is_better_none_is_found() -> None:
    found = better_plan(running(), KNOBS, LEFT)
    assert found is not None
    knobs = Knobs(found.plan.schedule, found.plan.batches, found.plan.batches)
    again = better_plan(running(found.plan), knobs, LEFT)
    assert again is None or again.gain < 1.05


def test_a_plan_has_as_many_places_as_are_asked_for() -> None:
    one = replace(LEFT, running=(50.0,), waiting=0)
    alone, more = (better_plan(running(), KNOBS, one, places=places) for places in (1, 5))
    assert alone is not None
    assert more is not None
    assert alone.plan.batches * alone.plan.batch_size == 1
    assert more.plan.batches * more.plan.batch_size >= 5
    assert more.gain <= alone.gain


def test_room_is_left_for_adapters_and_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    given = list[int]()

    def find(_: object, on: MachineProfile, *__: object, **___: object) -> None:
        given.append(sum(on.usable.values()))
        raise BudgetError("enough")

    with monkeypatch.context() as patch:
        patch.setattr("qoff.plan.reopen.find_plan", find)
        for extra in (0, 3000):
            assert better_plan(running(), KNOBS, LEFT, lambda _, x=extra: x) is None  # type: ignore[misc]
    assert given[0] - given[1] == 3000

    def beside(plan: Plan) -> int:
        return 1000 * plan.batch_size

    found = better_plan(running(), KNOBS, LEFT, beside)
    assert found is not None
    now = running(replace(found.plan, device_memory=None))
    taken = now.memory.total("device") + now.memory.total("host") + beside(found.plan)
    limit = 18 * MIB + running().memory.total("host")
    assert taken < limit
    assert found.plan.device_memory is not None
    assert found.plan.device_memory + now.memory.total("host") <= limit


def test_a_change_saves_in_proportion_to_what_is_left_and_costs_what_it_reads() -> None:
    better = Better(PLAN, 2.0, 3.0, 0.01, int(5e8))
    some = Remaining([], 10, 20.0)
    assert better.saved(some) == pytest.approx(30 * 3.0 / 2)
    assert better.saved(replace(some, follows=math.inf)) == pytest.approx(HORIZON_S / 2)
    assert better.saved(replace(some, waiting=1000, follows=math.inf)) == pytest.approx(1500)
    there = running()
    assert better.cost(some, there, KNOBS, 0.0) == pytest.approx(5.0)  # at 1e8 bytes a second
    assert better.cost(some, there, KNOBS, 7.0) == pytest.approx(7.0)
    shared = replace(some, shared=200)
    assert better.cost(shared, there, KNOBS, 0.0) == pytest.approx(7.0)


def test_places_that_stay_empty_are_part_of_the_cost() -> None:
    better, there = Better(PLAN, 2.0, 3.0, 0.01, 0), running()

    def cost(*tokens: float, follows: float = 0.0) -> float:
        return better.cost(Remaining(tokens, 1, follows, 100.0, 20.0), there, KNOBS, 0.0)

    assert cost(*[20.0] * 12) == pytest.approx(0.0, abs=1e-9)  # all end together
    assert cost(5.0, *[20.0] * 11) > 0
    assert cost(5.0, *[100.0] * 11) > cost(5.0, *[20.0] * 11)
    assert cost(50.0) == pytest.approx(0.0, abs=1e-9)  # nobody could have been beside it
    assert cost(50.0, follows=math.inf) > 0
