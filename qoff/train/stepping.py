"""When units are stepped: as each is complete, when the norm of all is known, or a step late."""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial

from qoff.kernels.cpu.optim.update import Rule

from .delayed import Delayed
from .gradients import Gradients, nothing
from .held import HeldUnits
from .optimizers import FactoredRule, Optimizer
from .tile_steps import TileSteps
from .tiles import Tiles
from .updates import Updater


class Stepping:
    """Steps units by their gradients beside the rest of a step.

    changing: whether weights have begun to change, and are not all of one step.
    """

    def __init__(
        self,
        held: HeldUnits,
        gradients: Gradients,
        updater: Updater,
        delayed: Delayed | None,
        tiles: Tiles,
        of_tiles: TileSteps,
    ) -> None:
        self.changing, self.delayed, self.tiles = False, delayed, tiles
        self._of_tiles = of_tiles
        self._held, self._gradients, self._updater = held, gradients, updater
        self._done: list[Future[None]] = []

    def begin(self, optimizer: Optimizer) -> None:
        """A step begins: that of the gradients of the one before, if it is delayed."""
        self._done.clear()
        self.tiles.begin()
        if self._held.apart and not self._gradients.are_kept:
            self._held.stepped.begin(self._order)
        if self.delayed is not None:
            self.changing = self.delayed.begin(optimizer)

    def ready(self, i: int) -> None:
        """Wait until the gradients of a unit may be made: the last's, before any loss is."""
        if self.delayed is not None:
            self.delayed.wait(i)

    def unit(self, rule: Rule | FactoredRule, i: int) -> None:
        """Step a unit that is complete; it is given back then."""
        held, gradients, weights = self._held, self._gradients, self._held.to_step(i)
        self.changing = True

        def after() -> None:
            gradients.give_back(i)
            held.stepped.write_back(i)

        self._done.append(
            self._updater.submit(i, held.units[i], rule, weights, partial(gradients.take, i), after)
        )
        self._done += self._of_tiles.submit(i, rule)

    def all_units(self, rule: Rule | FactoredRule) -> None:
        """Step all layers by the gradients that are kept; their weights come once more."""
        self._held.stepped.begin(self._order)
        for i in self._order:
            self.unit(rule, i)

    def later(self, step: int, scale: float) -> bool:
        """Have the gradients of a step wait for the next one, if updates are delayed."""
        if self.delayed is not None:
            self.settle()
            self.delayed.keep(step, scale)
        return self.delayed is not None

    def finish(self, rule: Rule | FactoredRule) -> None:
        """Step what is outside of layers, and wait for all. Raises what went wrong."""
        held, last = self._held, len(self._held.units) - 1
        self.changing = True
        outer = self._updater.submit(
            last,
            held.units[last],
            rule,
            lambda: held.outer.stepped,
            self._gradients.take_outer,
            nothing,
        )
        self._done += self._of_tiles.submit(last, rule)
        for update in (*self._done, outer):
            update.result()
        held.stepped.settle()
        held.outer.arrive()
        self.changing = False

    @property
    def _order(self) -> list[int]:
        return list(reversed(range(len(self._held.units) - 1)))

    def settle(self) -> None:
        """Have what is delayed done, if it was begun."""
        if self.delayed is not None and self.delayed.runs:
            self.delayed.finish()
            self.changing = False
