"""Units whose weights are in memory for a while: those that learn, and frozen ones beside them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from .frozen import FrozenWeights
from .layout import FlatUnit
from .slots import WeightSlots


class HeldUnits:
    """Binds the parameters of a unit to its weights from `hold` to `release`.

    units: the layers', then that of what is outside of them, whose flat weights `outer` stay.
    """

    def __init__(
        self, units: Sequence[FlatUnit], weights: WeightSlots, frozen: FrozenWeights, outer: Tensor
    ) -> None:
        self.units, self.weights, self.frozen, self.outer = units, weights, frozen, outer
        self._flat: dict[int, Tensor] = {}

    def flat(self, i: int) -> Tensor:
        """The weights of a unit that is held."""
        return self._flat[i]

    def begin(self, order: Iterable[int]) -> None:
        """Read these units ahead; none may be held."""
        self.weights.begin(order)

    def hold(self, i: int) -> None:
        """Wait for a unit and bind its parameters, unless it is held."""
        if i in self._flat:
            return
        self.borrow(i)
        if self.weights.moves(i):
            self.units[i].bind(self._flat[i])
        self.frozen.hold(i)

    def rebind(self, i: int) -> None:
        """Its weights lie elsewhere in memory, if they lie there."""
        memory = self.weights.places[i].memory
        if memory is not None:
            self.units[i].bind(self.units[i].flat(memory))

    def borrow(self, i: int) -> None:
        """Wait for a unit's weights, and bind none of its parameters."""
        self._flat[i] = self.units[i].flat(self.weights.acquire(i))

    def release(self, i: int) -> None:
        """Give a unit back."""
        del self._flat[i]
        self.frozen.release(i)
        if self.weights.moves(i):
            self.units[i].bind(None)
            self.weights.release(i)

    def take(self, i: int) -> Tensor:
        """The weights of a unit that is held, which whoever takes them gives back to `weights`."""
        flat = self._flat.pop(i)
        self.frozen.release(i)
        if self.weights.moves(i):
            self.units[i].bind(None)
        return flat

    def each(self) -> Iterator[tuple[int, FlatUnit, Tensor]]:
        """Number, unit and flat weights of each, until the next."""
        last = len(self.units) - 1
        self.begin(range(last))
        try:
            for i, unit in enumerate(self.units[:-1]):
                yield i, unit, unit.flat(self.weights.acquire(i))
                self.weights.release(i)
        finally:
            self.weights.stop()
        yield last, self.units[-1], self.outer

    @contextmanager
    def alone(self, i: int) -> Iterator[None]:
        """Hold one unit, outside of a step."""
        self.begin([i])
        try:
            self.hold(i)
            yield
        finally:
            self.end()  # a read that has failed is forgotten

    def end(self) -> None:
        """Give all back, and forget what is read ahead."""
        for i in list(self._flat):
            self.release(i)
        self.frozen.end()
        self.weights.stop()
