"""Plans that fit a machine, drawn at random or from all choices, and what they take."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch

from qoff.plan import Plan
from qoff.plan.certify import Certified, Certifier
from qoff.plan.cost import CostModel
from qoff.plan.native_sizes import NativeSizes
from qoff.plan.profile import MachineProfile
from qoff.plan.search import choices_for
from qoff.plan.workload import Workload

PARTS = ((0.0, 0.0), (0.5, 0.0), (0.0, 0.5), (0.0, 1.0), (1.0, 0.0))  # of the KV cache: host, disk


class Candidates:
    """Plans for a workload: each choice of the search, with the KV cache in any place."""

    def __init__(
        self, sizes: NativeSizes, machine: MachineProfile, work: Workload, template: Plan
    ) -> None:
        cost = CostModel(sizes, machine, work, template.kv, 4)
        self._certifier = Certifier(cost, template, torch.device("cpu"), torch.float32)
        self._choices = choices_for(work, machine.on_gpu)

    def drawn(self, count: int, seed: int) -> list[Certified]:
        """So many that fit, at random, each alike likely."""
        numbers, found = random.Random(seed), dict[str, Certified]()
        for _ in range(100 * count):
            index = numbers.randrange(len(self._choices))
            self._take(found, index, numbers.choice(PARTS))
            if len(found) == count:
                break
        return list(found.values())

    def all(self) -> Iterator[Certified]:
        """Each that fits, once."""
        found = dict[str, Certified]()
        for index in range(len(self._choices)):
            for part in PARTS:
                self._take(found, index, part)
        yield from found.values()

    def _take(self, found: dict[str, Certified], index: int, parts: tuple[float, float]) -> None:
        one = self._certifier.certify(self._choices.one(index), *parts)
        if one is not None:
            found.setdefault(repr(one.plan), one)
