"""A forward pass as a greenlet: code that knows nothing of units waits for them all the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

from greenlet import GreenletExit, getcurrent, greenlet
from torch import Tensor

from qoff.kernels.layout.qtensor import QTensor
from qoff.memory import Tile, TiledMatrix, Unit, Weights
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


def current() -> ModulePass:
    """The pass that is being computed."""
    here = getcurrent()
    assert isinstance(here, ModulePass)
    return here


def by_tiles(matrix: TiledMatrix) -> Iterator[tuple[Tile, QTensor]]:
    """Fetch all tiles of a matrix; each is valid until the next one is asked for."""
    for tile in matrix.tiles:
        yield tile, cast(QTensor, current().fetch(tile)[tile.name])
