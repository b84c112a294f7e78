"""Gradients of units, flat, from the first micro-batch to the update.

A unit's are summed over the micro-batches of a step in float32, and kept in float32 or bfloat16
until it is stepped: so they are rounded once. Those of a single micro-batch are no sum.
"""

from __future__ import annotations

import math
import queue
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import chain
from weakref import WeakMethod

import torch
from torch import Tensor, nn

from qoff.memory.arena import PAGE, round_up

from .homes import Home, Homes, Link
from .layout import FlatUnit

_PIECE = 1 << 20  # elements


@dataclass(frozen=True)
class Dtypes:
    """Of layers' gradients: while micro-batches are added, and from then on."""

    sums: torch.dtype = torch.float32
    kept: torch.dtype = torch.float32

    @property
    def rounds(self) -> bool:
        """Whether sums are rounded when they are complete."""
        return self.sums != self.kept


_WIDE = Dtypes()


class Gradients:
    """Sums the gradients of a unit over micro-batches, and keeps them where they are clipped.

    outer: of the last unit, from a step's begin to its end; float32. buffers: that the others take
    turns in. places: homes of the others' gradients, until they are used; None: none are kept.
    landing: on a GPU, host memory that they come to for their unit to be stepped. outer_home: the
    same, of the last unit. dtypes: of all but the last unit. rounded: memory that sums are rounded
    to, where that is not their home.
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
        dtypes: Dtypes = _WIDE,
        rounded: Sequence[Tensor] = (),
    ) -> None:
        self._homes, self._link, self._units, self._outer = homes, link, units, outer
        self._places, self._outer_home, self.dtypes = places, outer_home, dtypes
        self._free = self._leaving = queue_of(buffers)  # to sum in, and to be written from
        if dtypes.rounds:
            self._leaving = queue_of(rounded)
        self._apart = bool(landing)
        self._landing = queue_of(landing) if self._apart else self._leaving
        self._sums: dict[nn.Parameter, Tensor] = {}  # of parameters that are bound
        self._begun: set[nn.Parameter] = set()  # of these, those that have a sum
        self._writes: dict[int, Future[None]] = {}
        self._squares: list[Tensor] = []
        self._summed: dict[int, Tensor] = {}  # memory of units that are open
        self._taken: dict[int, Tensor] = {}  # memory of units that are stepped
        add = WeakMethod(self._add)  # torch's hooks are no cycle that Python would find

        def hook(p: Tensor) -> None:
            found = add()
            if found is not None:
                found(p)

        for p in chain.from_iterable(unit.parameters.values() for unit in units):
            p.register_post_accumulate_grad_hook(hook)

    @property
    def outer(self) -> Tensor:
        """Of the last unit, flat."""
        return _flat(self._units[-1], self._outer, torch.float32)

    @property
    def are_kept(self) -> bool:
        """Whether all units' gradients stay after the backward pass."""
        return self._places is not None

    def begin(self) -> None:
        """Forget the last step; the last unit is open."""
        self._squares.clear()
        self._bind(self._units[-1], self.outer)

    def open(self, i: int) -> None:
        """Bind memory to a unit, if anything learns in it."""
        if not self._units[i].count:
            return
        home = self._summed_at_home(i)
        self._summed[i] = memory = self._free.get() if home is None else home
        self._bind(self._units[i], _flat(self._units[i], memory, self.dtypes.sums))

    def close(self, i: int) -> None:
        """The unit is complete."""
        unit, kept = self._units[i], self.dtypes.kept
        if not unit.count:
            return
        memory = self._summed[i]
        flat = _flat(unit, memory, self.dtypes.sums)
        self._complete(unit, flat)
        home = None
        if self._places is not None:
            self._squares += squares(flat)
            home = self._places[i]
        elif self._apart:
            nbytes = round_up(kept.itemsize * unit.count, PAGE)
            self._taken[i] = landed = self._landing.get()
            home = Home("gradients", nbytes, landed[:nbytes])
        here = None if home is None else self._link.here(home)
        if self.dtypes.rounds:
            memory = self._rounded(unit, flat, here)
            self._free.put(self._summed[i])
        del self._summed[i]
        if home is None:
            self._taken[i] = memory
        elif here is None:
            self._writes[i] = self._link.write(
                home, memory[: home.nbytes], lambda: self._leaving.put(memory)
            )

    def sum_of(self, p: Tensor) -> Tensor:
        """Where the gradients of a parameter that is bound are summed: of the last, float32."""
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
            self._writes[-1] = self._link.write(self._outer_home, source, nothing)

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
                return _flat(unit, home.memory, self.dtypes.kept)
            self._taken[i] = memory = self._landing.get()
            self._homes.read(home, memory[: home.nbytes]).result()
        return _flat(unit, self._taken[i], self.dtypes.kept)

    def take_outer(self) -> Tensor:
        """Those of the last unit, where it is stepped; in any thread."""
        write = self._writes.pop(-1, None)
        if write is not None:
            write.result()
        memory = None if self._outer_home is None else self._outer_home.memory
        return self.outer if memory is None else _flat(self._units[-1], memory, torch.float32)

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
            if self._summed_at_home(i) is None:
                self._free.put(memory)
        self._summed.clear()
        self._sums.clear()
        self._begun.clear()
        for p in chain.from_iterable(unit.parameters.values() for unit in self._units):
            p.grad = None

    def _summed_at_home(self, i: int) -> Tensor | None:
        """The memory of a unit's home, if its gradients are summed there."""
        if self._places is None or self.dtypes.rounds:
            return None
        return self._link.here(self._places[i])

    def _rounded(self, unit: FlatUnit, flat: Tensor, home: Tensor | None) -> Tensor:
        """Memory with the complete gradients as they are kept: their home's, if that is here."""
        memory = self._leaving.get() if home is None else home
        try:
            _flat(unit, memory, self.dtypes.kept).copy_(flat)
        except BaseException:
            if home is None:
                self._leaving.put(memory)
            raise
        return memory

    def _bind(self, unit: FlatUnit, flat: Tensor) -> None:
        for name, x in unit.views(flat).items():
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


def _flat(unit: FlatUnit, memory: Tensor, dtype: torch.dtype) -> Tensor:
    return memory[: dtype.itemsize * unit.count].view(dtype)


def add_into(total: Tensor, x: Tensor) -> None:
    """Add x to `total`, float32, a few rows at a time: torch widens what it adds in memory."""
    rows = max(1, _PIECE // max(1, x[:1].numel()))
    for into, part in zip(total.split(rows), x.split(rows), strict=True):
        into += part


def square(x: Tensor) -> float:
    """The sum of squares, in float64 a piece at a time."""
    return math.fsum(map(float, squares(x)))


def squares(x: Tensor) -> list[Tensor]:
    """The sums of squares of the pieces of a tensor, float64."""
    return [part.double().square().sum() for part in x.view(-1).split(_PIECE)]


def queue_of(buffers: Sequence[Tensor]) -> queue.SimpleQueue[Tensor]:
    """Buffers that are free, to be taken and put back by any thread."""
    found: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
    for buffer in buffers:
        found.put(buffer)
    return found


def nothing() -> None:
    """What is to be done after a transfer behind which nobody waits."""
