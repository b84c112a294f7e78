"""Prompts are read in large pieces where rounds wait for weights, and else in small ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from qoff.plan import Memory
from qoff.plan.adapt import RunningPlan
from qoff.plan.pieces import prompt_tokens
from qoff.plan.profile import Link
from qoff.plan.search import find_plan
from qoff.plan.workload import Lengths, Workload
from tests.plan.machines import GIB, MIB, machine, sizes

WORK = Workload(Lengths.of(256), Lengths.of(64), 4)


def read_at_once(memory: int, disk: float, least: int | None = 32) -> int:
    """Tokens of a piece in so much memory, with a disk of so many bytes a second."""
    on = replace(machine(device=memory), disk_read=Link(disk, 1e-4, 0.0))
    best = find_plan(sizes(), on, WORK)
    plan = replace(best.plan, prefill_tokens=400, least_prefill_tokens=least)
    taken = Memory.of(plan, sizes().spec, sizes().shapes)
    return prompt_tokens(RunningPlan(sizes(), plan, taken, best.residency, on, torch.float32))


@pytest.mark.parametrize(
    ("memory", "disk", "found"),
    [
        pytest.param(GIB, 1e8, 32, id="nothing-streams"),
        pytest.param(6 * MIB, 1e10, 32, id="a-fast-disk"),
        pytest.param(6 * MIB, 1e6, 400, id="a-slow-disk"),
    ],
)
def test_pieces_grow_while_rounds_hardly_do(memory: int, disk: float, found: int) -> None:
    assert read_at_once(memory, disk) == found


def test_plans_without_a_least_size_read_as_much_as_they_may() -> None:
    assert read_at_once(GIB, 1e8, least=None) == 400
    assert read_at_once(GIB, 1e8, least=1000) == 400
