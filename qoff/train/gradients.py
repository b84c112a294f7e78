"""Gradients of units, float32 and flat, from the first micro-batch to the update."""

from __future__ import annotations

import math
import queue
from collections.abc import Sequence
from concurrent.futures import Future
from itertools import chain

import torch
from torch import Tensor, nn

from qoff.memory.arena import PAGE, round_up

from .homes import Home, Homes, Link
from .layout import FlatUnit

_PIECE = 1 << 20  # elements


class Gradients:
    """Sums the gradients of a unit over micro-batches, and keeps them where they are clipped.

    outer: of the last unit, from a step's begin to its end. buffers: that the others take turns in.
    places: homes of the others' gradients, until they are used; None: none are kept. landing: on a
    GPU, host memory that they come to for their unit to be stepped. outer_home: the same, of the
    last unit.
    """

    def __init__(
        self,
        homes: Homes,
        link: Link,
        units: Sequence[FlatUnit],
        outer: Tensor,
        buffers: Sequence[Tensor],
        places: Sequence[Home] | None,
        landing: Sequence[Tensor] = (),
        outer_home: Home | None = None,
    ) -> None:
        self._homes, self._link, self._units, self._outer = homes, link, units, outer
        self._places, self._outer_home = places, outer_home
        self._free, self._landing = _queue(buffers), _queue(landing)
        self._apart = bool(landing)
        if not self._apart:
            self._landing = self._free
        self._sums: dict[nn.Parameter, Tensor] = {}  # of parameters that are bound
        self._begun: set[nn.Parameter] = set()  # of these, those that have a sum
        self._writes: dict[int, Future[None]] = {}
        self._squares: list[Tensor] = []
        self._summed: dict[int, Tensor] = {}  # memory of units that are open
        self._taken: dict[int, Tensor] = {}  # memory of units that are stepped
        for p in chain.from_iterable(unit.parameters.values() for unit in units):
            p.register_post_accumulate_grad_hook(self._add)

    @property
    def outer(self) -> Tensor:
        """Of the last unit, flat."""
        return self._flat(self._units[-1], self._outer)

    @property
    def are_kept(self) -> bool:
        """Whether all units' gradients stay after the backward pass."""
        return self._places is not None

    def begin(self) -> None:
        """Forget the last step; the last unit is open."""
        self._squares.clear()
        self._bind(self._units[-1], self._outer)

    def open(self, i: int) -> None:
        """Bind memory to a unit, if anything learns in it."""
        if not self._units[i].count:
            return
        home = None if self._places is None else self._link.here(self._places[i])
        self._summed[i] = memory = self._free.get() if home is None else home
        self._bind(self._units[i], memory)

    def close(self, i: int) -> None:
        """The unit is complete."""
        unit = self._units[i]
        if not unit.count:
            return
        memory = self._summed[i]
        flat = self._flat(unit, memory)
        self._complete(unit, flat)
        if self._places is not None:
            self._squares += squares(flat)
            home = self._places[i]
        elif self._apart:
            nbytes = round_up(flat.nbytes, PAGE)
            self._taken[i] = landed = self._landing.get()
            home = Home("gradients", nbytes, landed[:nbytes])
        else:
            self._taken[i] = self._summed.pop(i)
            return
        del self._summed[i]
        if self._link.here(home) is None:
            self._writes[i] = self._link.write(
                home, memory[: home.nbytes], lambda: self._free.put(memory)
            )

    def sum_of(self, p: Tensor) -> Tensor:
        """Where the gradients of a parameter that is bound are summed, float32."""
        assert isinstance(p, nn.Parameter)
        found = self._sums[p]
        if p not in self._begun:
            self._begun.add(p)
            found.zero_()
        return found

    def close_outer(self) -> None:
        """The last unit is complete."""
        unit = self._units[-1]
        self._complete(unit, self.outer)
        if self._outer_home is not None and unit.count:
            source = self._outer[: self._outer_home.nbytes]
            self._writes[-1] = self._link.write(self._outer_home, source, _nothing)

    def norm(self, others: float = 0.0) -> float:
        """The norm of all gradients. others: the sum of squares of those that are not here."""
        found = [float(x) for x in (*self._squares, *squares(self.outer))]
        return math.sqrt(math.fsum([math.fsum(found), others]))

    def take(self, i: int) -> Tensor:
        """The complete gradients of a unit, until `give_back`; in any thread."""
        unit = self._units[i]
        if not unit.count:
            return torch.empty(0)
        write = self._writes.pop(i, None)
        if write is not None:
            write.result()
        if self._places is not None:
            home = self._places[i]
            if home.memory is not None:
                return self._flat(unit, home.memory)
            self._taken[i] = memory = self._landing.get()
            self._homes.read(home, memory[: home.nbytes]).result()
        return self._flat(unit, self._taken[i])

    def take_outer(self) -> Tensor:
        """Those of the last unit, where it is stepped; in any thread."""
        write = self._writes.pop(-1, None)
        if write is not None:
            write.result()
        memory = None if self._outer_home is None else self._outer_home.memory
        return self.outer if memory is None else self._flat(self._units[-1], memory)

    def settle(self) -> None:
        """Wait until all that is kept is where it is kept. Raises DiskWriteError."""
        for write in self._writes.values():
            write.result()

    def give_back(self, i: int) -> None:
        """The memory of a unit's gradients is free."""
        memory = self._taken.pop(i, None)
        if memory is not None:
            self._landing.put(memory)

    def end(self) -> None:
        """Let go of all, however the step has ended."""
        for write in self._writes.values():
            write.exception()
        self._writes.clear()
        for i in list(self._taken):
            self.give_back(i)
        for i, memory in self._summed.items():
            if self._places is None or self._link.here(self._places[i]) is None:
                self._free.put(memory)
        self._summed.clear()
        self._sums.clear()
        self._begun.clear()
        for p in chain.from_iterable(unit.parameters.values() for unit in self._units):
            p.grad = None

    def _bind(self, unit: FlatUnit, memory: Tensor) -> None:
        for name, x in unit.views(self._flat(unit, memory)).items():
            self._sums[unit.parameters[name]] = x
            self._begun.discard(unit.parameters[name])

    def _complete(self, unit: FlatUnit, flat: Tensor) -> None:
        """What has no gradient, and what lies between, is zero."""
        for p in unit.parameters.values():
            total = self._sums.pop(p)
            if p not in self._begun:
                total.zero_()
            self._begun.discard(p)
        for gap in unit.gaps(flat):
            gap.zero_()

    def _add(self, p: Tensor) -> None:
        """Take a gradient that autograd has made: the first one as it is."""
        assert isinstance(p, nn.Parameter)
        total = self._sums.get(p)
        if total is None or p.grad is None:
            return
        if p in self._begun:
            add_into(total.view(-1), p.grad.reshape(-1))
        else:
            total.copy_(p.grad)
            self._begun.add(p)
        p.grad = None

    @staticmethod
    def _flat(unit: FlatUnit, memory: Tensor) -> Tensor:
        return memory[: 4 * unit.count].view(torch.float32)


def add_into(total: Tensor, x: Tensor) -> None:
    """Add x to float32 `total`, a few rows at a time: torch widens what it adds in memory."""
    rows = max(1, _PIECE // max(1, x[:1].numel()))
    for into, part in zip(total.split(rows), x.split(rows), strict=True):
        into += part


def square(x: Tensor) -> float:
    """The sum of squares, in float64 a piece at a time."""
    return math.fsum(map(float, squares(x)))


def squares(x: Tensor) -> list[Tensor]:
    """The sums of squares of the pieces of a tensor, float64."""
    return [part.double().square().sum() for part in x.view(-1).split(_PIECE)]


def _queue(buffers: Sequence[Tensor]) -> queue.SimpleQueue[Tensor]:
    found: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
    for buffer in buffers:
        found.put(buffer)
    return found


def _nothing() -> None:
    pass
