"""Units whose weights are in memory for a while: those that learn, and frozen ones beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from .frozen import FrozenWeights
from .homes import Home, Link
from .layout import FlatUnit
from .slots import WeightSlots


class OuterWeights:
    """What is outside of layers.

    flat: its weights, which stay where they are computed with. stepped: where they are stepped: on
    a GPU, in host memory.
    """

    def __init__(self, unit: FlatUnit, memory: Tensor, home: Home, link: Link) -> None:
        """memory: uint8, which they are computed with. home: of them, in memory."""
        assert home.memory is not None
        self.flat, self.stepped = unit.flat(memory), unit.flat(home.memory)
        self._memory, self._home, self._link = memory[: home.nbytes], home, link

    def arrive(self) -> None:
        """Compute with what was stepped from now on."""
        if self._link.here(self._home) is None:
            self._link.read(self._home, self._memory).result()


class HeldUnits:
    """Binds the parameters of a unit to its weights from `hold` to `release`.

    units: the layers', then that of what is outside of them, whose weights `outer` stay. stepped:
    serves weights where they are stepped: on a GPU, in host memory, else as `weights` does.
    """

    def __init__(
        self,
        units: Sequence[FlatUnit],
        weights: WeightSlots,
        stepped: WeightSlots,
        frozen: FrozenWeights,
        outer: OuterWeights,
    ) -> None:
        self.units, self.weights, self.stepped = units, weights, stepped
        self.frozen, self.outer = frozen, outer
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
        memory = self.weights.here(i)
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

    @property
    def apart(self) -> bool:
        """Whether units are stepped in other memory than they are computed with."""
        return self.stepped is not self.weights

    def to_step(self, i: int) -> Callable[[], Tensor]:
        """What gives the weights of a unit to who steps it, in any thread; it is held no more.

        They are given back to `stepped`.
        """
        if self.apart:
            if i in self._flat:
                self.release(i)
            return lambda: self.units[i].flat(self.stepped.acquire(i))
        if i not in self._flat:
            self.borrow(i)
        flat = self._flat.pop(i)
        self.frozen.release(i)
        if self.weights.moves(i):
            self.units[i].bind(None)
        return lambda: flat

    def each(self) -> Iterator[tuple[int, FlatUnit, Tensor]]:
        """Number, unit and flat weights of each, where they are stepped, until the next."""
        last = len(self.units) - 1
        self.stepped.begin(range(last))
        try:
            for i, unit in enumerate(self.units[:-1]):
                yield i, unit, unit.flat(self.stepped.acquire(i))
                self.stepped.release(i)
        finally:
            self.stepped.stop()
        yield last, self.units[-1], self.outer.stepped

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
        self.stepped.stop()
