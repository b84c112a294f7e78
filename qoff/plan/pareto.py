"""Memory against speed: the plans that no other one beats in both."""

from __future__ import annotations

from dataclasses import dataclass

from qoff.errors import BudgetError
from qoff.kvcache.store.placement import DEVICE, HOST

from .manual import Plan
from .profile import MachineProfile
from .search import find_plan
from .sizes import Sizes
from .workload import Workload

_PARTS = (0.1, 0.15, 0.2, 0.3, 0.4, 0.55, 0.75, 1.0)  # of the memory there


@dataclass(frozen=True)
class Point:
    """memory: bytes of the tier that were given. tokens_per_s: of answers."""

    memory: int
    tokens_per_s: float


def pareto_front(
    sizes: Sizes, machine: MachineProfile, workload: Workload, template: Plan | None = None
) -> list[Point]:
    """The fastest plans by memory, ascending: on a CPU its own, beside a GPU that of the host.

    Only points that more memory makes faster. Raises BudgetError where no plan fits all of it.
    """
    tier = HOST if machine.on_gpu else DEVICE
    front: list[Point] = []
    for part in _PARTS:
        memory = int(machine.usable[tier] * part)
        try:
            found = find_plan(sizes, machine.with_memory(**{tier: memory}), workload, template)
        except BudgetError:
            if part == _PARTS[-1]:
                raise
            continue
        if not front or found.decode.tokens_per_s > front[-1].tokens_per_s:
            front.append(Point(memory, found.decode.tokens_per_s))
    return front
