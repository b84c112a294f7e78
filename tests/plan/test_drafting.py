"""Drafted tokens in plans: as many as pay, by what a pass over more tokens costs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from qoff.errors import ArgumentError
from qoff.plan import Memory
from qoff.plan.adapt import Load, RunningPlan
from qoff.plan.certify import choices_of
from qoff.plan.drafting import pass_seconds
from qoff.plan.search import find_plan
from qoff.plan.workload import Lengths, Workload

from .machines import MIB, machine, mixture, sizes

WORK = Workload(Lengths.of(256), Lengths.of(64), 1)


def test_a_draft_ends_with_the_first_wrong_token() -> None:
    half = replace(WORK, acceptance=0.5)
    assert half.tokens_of_pass(0) == 1
    assert half.tokens_of_pass(2) == pytest.approx(1 + 0.5 + 0.25)
    assert WORK.tokens_of_pass(3) == 1


def test_plans_draft_where_weights_stream_and_tokens_are_accepted() -> None:
    model = sizes()
    plain = find_plan(model, machine(device=6 * MIB), WORK)
    assert plain.plan.draft_tokens == 0
    drafted = [0]
    for acceptance in (0.02, 0.5, 0.9):
        best = find_plan(model, machine(device=6 * MIB), replace(WORK, acceptance=acceptance))
        assert best.seconds <= plain.seconds
        assert best.bound <= best.seconds
        assert best.memory.total("device") <= machine(device=6 * MIB).usable["device"]
        drafted.append(best.plan.draft_tokens)
    assert drafted == sorted(drafted)
    assert drafted[-1] >= 4
    busy = Workload(Lengths.of(256), Lengths.of(64), 512, acceptance=0.3)  # computing is the limit
    alone = find_plan(model, machine(), replace(busy, requests=1))
    assert find_plan(model, machine(), busy).plan.draft_tokens <= alone.plan.draft_tokens


@pytest.mark.parametrize(("requests", "acceptance"), [(1, 0.5), (64, 0.02)])
def test_the_bound_is_one_of_plans_that_draft(requests: int, acceptance: float) -> None:
    """Also where the best plan does not: another one might."""
    model, on = sizes(), machine(device=6 * MIB)
    plain = find_plan(model, on, replace(WORK, requests=requests))
    work = replace(WORK, requests=requests, acceptance=acceptance)
    best = find_plan(model, on, work)
    assert best.bound == min(best.seconds, plain.bound / work.tokens_of_pass(16))


def test_drafted_tokens_of_a_template_are_chosen_again() -> None:
    """As where another machine is compared with a plan that drafts."""
    model, on, rare = sizes(), machine(device=6 * MIB), replace(WORK, requests=64, acceptance=0.02)
    best = find_plan(model, on, rare)
    assert best.plan.draft_tokens < 8
    again = find_plan(model, on, rare, replace(best.plan, draft_tokens=8))
    assert (again.plan, again.bound) == (best.plan, best.bound)


def test_passes_take_longer_with_each_drafted_token() -> None:
    model, on = sizes(), machine(device=6 * MIB)
    best = find_plan(model, on, WORK)
    plan = replace(best.plan, draft_tokens=6, batches=2)
    memory = Memory.of(plan, model.spec, model.shapes)
    running = RunningPlan(model, plan, memory, best.residency, on, torch.float32)
    seconds = pass_seconds(running)
    for sequences in (1, 8):
        each = seconds(sequences)
        assert len(each) == 7
        assert list(each) == sorted(each)
        load = Load(2 * sequences, 2, plan.context // 2)
        assert each[0] == running.seconds(load, plan.schedule)
    grows = [seconds(n)[6] - seconds(n)[0] for n in (1, 8)]
    assert grows[1] > 2 * grows[0] > 0
    with_model = pass_seconds(running, running)(1)  # which drafts in a pass a token
    assert with_model[3] - seconds(1)[3] == pytest.approx(3 * 2 * running.seconds(
        Load(1, 1, plan.context // 2), plan.schedule))  # fmt: skip


def test_drafted_tokens_want_experts_too() -> None:
    model, on = mixture(), machine(device=9 * MIB)
    best, work = find_plan(model, on, WORK), replace(WORK, acceptance=0.5)
    plan, there = best.plan, (best.memory, best.residency)
    assert best.hits is not None
    certifier = RunningPlan(model, plan, *there, on, torch.float32).certifier(work)
    drafts = (replace(plan, draft_tokens=drafted) for drafted in (0, 7))
    few, many = (certifier.forecast(choices_of(one), one, *there).hits for one in drafts)
    assert few is not None
    assert many is not None
    assert many < few


def test_what_passes_take_is_kept_for_every_size_of_a_batch() -> None:
    model, on = sizes(), machine(device=6 * MIB)
    best = find_plan(model, on, WORK)
    plan = replace(best.plan, draft_tokens=1, batch_size=70)
    memory = Memory.of(plan, model.spec, model.shapes)
    seconds = pass_seconds(RunningPlan(model, plan, memory, best.residency, on, torch.float32))
    first = [seconds(sequences) for sequences in range(1, 71)]
    assert all(seconds(sequences) is was for sequences, was in enumerate(first, 1))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("acceptance", value) for value in (1, -0.1, float("nan"), "0.5")),
        *(("shared", value) for value in (1, -0.1, float("nan"), "0.5")),
        *(("requests", value) for value in (0, 1.0, True, 1 << 41)),
        *(("token_s", value) for value in (0, -1.0, float("nan"), "0.5")),
        ("objective", "speed"),
    ],
)
def test_other_parts_are_refused(name: str, value: object) -> None:
    with pytest.raises(ArgumentError, match=f"{name} is {value!r}; use "):
        replace(WORK, **{name: value})  # type: ignore[arg-type]
