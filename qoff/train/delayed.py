"""Updates by the gradients of the step before, beside the whole of the step that makes the next.

The one-step delayed parameter update of ZeRO-Offload (arXiv 2101.06840).
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import chain

from torch import Tensor

from .gradients import Gradients
from .held import HeldUnits
from .homes import Home, Homes
from .optimizers import Optimizer
from .slots import WeightSlots
from .tile_steps import TileSteps
from .tiles import Tiles
from .updates import Updater


@dataclass(frozen=True)
class Pending:
    """An update that waits: the step whose gradients are kept, and their factor."""

    step: int
    scale: float


class NextWeights:
    """Weights as an update makes them, while the present ones are still computed with.

    after: a home for each unit, in memory where its present one is. slots: for those on disk.
    """

    def __init__(
        self, homes: Homes, present: WeightSlots, after: list[Home], slots: Sequence[Tensor]
    ) -> None:
        self._present, self._after = present.places, after
        self._slots = WeightSlots(homes, present.places, slots)

    def begin(self, order: Sequence[int]) -> None:
        """Read the units on disk ahead, in this order."""
        self._slots.begin(order)

    def take(self, i: int) -> Tensor:
        """A unit's weights, uint8, to be changed until `give_back`. Raises DiskReadError."""
        now, after = self._slots.acquire(i), self._after[i].memory
        return now if after is None else after.copy_(now)

    def give_back(self, i: int) -> None:
        """A unit is changed."""
        self._slots.write_back(i, self._after[i])

    def turn(self) -> None:
        """The weights that were made are the present ones. Raises DiskWriteError."""
        self._slots.settle()
        self._present[:], self._after = self._after, list(self._present)

    def stop(self) -> None:
        """Let go of what is on its way."""
        self._slots.stop()


class Delayed:
    """Keeps the gradients of a step, and steps all units by them during the next one.

    outer: memory for gradients of what is outside of layers; its weights are stepped at the end, as
    a step uses them from its begin to its end. Tiles lie twice, as layers do. pending: what waits,
    from `keep` to `begin`.
    """

    def __init__(
        self,
        held: HeldUnits,
        gradients: Gradients,
        updater: Updater,
        weights: NextWeights,
        outer: Tensor,
        tiles: Tiles,
        of_tiles: TileSteps,
    ) -> None:
        self.pending: Pending | None = None
        self._held, self._gradients, self._updater = held, gradients, updater
        self._weights, self._outer = weights, outer
        self._tiles, self._of_tiles = tiles, of_tiles
        self._running: dict[int, list[Future[None]]] = {}
        self._last: partial[Future[None]] | None = None

    @property
    def runs(self) -> bool:
        """Whether an update was begun that `finish` has to end."""
        return self._last is not None

    def begin(self, optimizer: Optimizer) -> bool:
        """Start the update that waits; returns whether there is one."""
        if self.pending is None:
            return False
        pending, units = self.pending, self._held.units
        rule = optimizer.rule(pending.step, optimizer.rate(pending.step), pending.scale)
        self.pending, last = None, len(units) - 1
        order = list(reversed(range(last)))
        self._weights.begin(order)
        self._running[last] = self._of_tiles.submit(last, rule)
        for i in order:
            update = self._updater.submit(
                i, units[i], rule, partial(self._flat, i), partial(self._gradients.take, i),
                partial(self._done, i),
            )  # fmt: skip
            self._running[i] = [update, *self._of_tiles.submit(i, rule)]
        self._last = partial(
            self._updater.submit, last, units[last], rule, lambda: self._held.outer.stepped,
            lambda: self._outer, lambda: None,
        )  # fmt: skip
        return True

    def wait(self, i: int) -> None:
        """Wait until a unit is stepped: its gradients may be made anew. Raises what went wrong."""
        for update in self._running.get(i, ()):
            update.result()

    def finish(self) -> None:
        """Wait until all units are stepped, and compute with their new weights from now on."""
        assert self._last is not None
        try:
            for update in (*chain.from_iterable(self._running.values()), self._last()):
                update.result()
            self._weights.turn()
            self._tiles.turn()
            self._held.outer.arrive()
        finally:
            self._updater.wait()
            self._weights.stop()
            self._running.clear()
            self._last = None
        for i in range(len(self._held.units) - 1):
            self._held.rebind(i)

    def keep(self, step: int, scale: float) -> None:
        """The gradients of a step are complete: they wait from now on. Raises DiskWriteError."""
        self._gradients.settle()
        self._tiles.keep()
        self._outer.copy_(self._gradients.take_outer())
        self.pending = Pending(step, scale)

    def _flat(self, i: int) -> Tensor:
        return self._held.units[i].flat(self._weights.take(i))

    def _done(self, i: int) -> None:
        self._gradients.give_back(i)
        self._weights.give_back(i)
