"""A forward pass as a greenlet: code that knows nothing of units waits for them all the same."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

from greenlet import GreenletExit, getcurrent, greenlet
from torch import Tensor

from qoff.memory import ChosenExperts, Unit, Weights
from qoff.models.native.linear import Steps


class ModulePass(greenlet):
    """Runs `work` and stops wherever it calls `fetch`.

    logit_rows: int64 [2, R], sequence and column of each token whose logits are wanted.
    """

    def __init__(self, work: Callable[[], object], logit_rows: Tensor) -> None:
        super().__init__(work)
        self.logit_rows = logit_rows
        self.attention: Any = None  # see `attention.register`; None: transformers' own
        self.resumed: Callable[[], None] | None = None  # called after a tile was fetched

    def fetch(self, unit: Unit) -> Weights:
        """Hand control back until the weights of a unit are there; valid until the next fetch."""
        assert self.parent is not None
        weights: Weights = self.parent.switch(unit)
        if self.resumed is not None:
            self.resumed()
        return weights

    def steps(self) -> Steps:
        """The pass as a generator over its units; returns what `work` does."""
        try:
            wanted = self.switch()
            while not self.dead:
                weights = yield wanted
                self.parent = getcurrent()
                wanted = self.switch(weights)
            return wanted
        finally:
            if not self.dead:  # closed early, or one of its weights could not be read
                self.throw(GreenletExit)


def by_turns(
    passes: Sequence[ModulePass], between: Callable[[], None]
) -> Generator[Unit, Weights, list[Any]]:
    """Passes that ask for the same units, which come once for all; returns what each does.

    Experts of a layer come for those that want some before any goes on. between: called before
    each of the other units.
    """
    each = [one.steps() for one in passes]
    found: dict[int, Any] = {}
    try:
        wanted = {i: next(one) for i, one in enumerate(each)}
        while wanted:
            waiting = [i for i, x in wanted.items() if isinstance(x, ChosenExperts)]
            if not waiting:
                between()
                waiting = [*wanted]
            weights = yield _together([wanted[i] for i in waiting])
            for i in waiting:
                try:
                    wanted[i] = each[i].send(weights)
                except StopIteration as end:
                    found[i] = end.value
                    del wanted[i]
        return [found[i] for i in range(len(passes))]
    finally:
        for one in each:
            one.close()


def _together(units: Sequence[Unit]) -> Unit:
    """The unit that passes ask for, or all experts of its layer that any does."""
    first = units[0]
    if not isinstance(first, ChosenExperts):
        assert all(unit == first for unit in units)
        return first
    some = [unit for unit in units if isinstance(unit, ChosenExperts) and unit.layer == first.layer]
    assert len(some) == len(units)
    numbers = {number for unit in some for number in unit.numbers}
    return ChosenExperts(first.layer, tuple(sorted(numbers)))
