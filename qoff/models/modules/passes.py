"""A forward pass as a greenlet: code that knows nothing of units waits for them all the same."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

from greenlet import GreenletExit, getcurrent, greenlet
from torch import Tensor

from qoff.memory import Unit, Weights
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

    between: called before each unit.
    """
    each = [one.steps() for one in passes]
    found = list[Any]()
    try:
        wanted = [next(one) for one in each]
        while not found:
            assert all(unit == wanted[0] for unit in wanted)
            between()
            weights = yield wanted[0]
            wanted.clear()
            for one in each:
                try:
                    wanted.append(one.send(weights))
                except StopIteration as end:
                    found.append(end.value)
        assert len(found) == len(passes)
        return found
    finally:
        for one in each:
            one.close()
