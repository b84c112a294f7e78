"""What layers save for their backward: kept, or swapped to disk, within bounds of bytes.

What is neither is computed again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from qoff.memory.arena import PAGE, round_up

from .swaps import LINE, STAGES, Place, Stage, Swaps

_BUCKETS = 2048  # of bytes, in the plan
Shape: TypeAlias = tuple[torch.Size, torch.dtype]
_Form: TypeAlias = tuple[Shape | None, ...]  # of what a layer is given beside hidden states


@dataclass(frozen=True)
class Cost:
    """Of a layer with inputs of a shape: bytes that its backward needs, seconds of its forward.

    on_stage: bytes on a stage, where each tensor is aligned.
    """

    nbytes: int
    seconds: float
    on_stage: int = 0


@dataclass(frozen=True)
class _Kept:
    x: Tensor
    edge: GradientEdge
    nbytes: int


@dataclass
class _Tally:
    """Memory that a layer saves, each once, but for what is there anyway; and its input."""

    x: Tensor
    elsewhere: set[int]  # storages
    storages: dict[int, int] = field(default_factory=dict)

    def add(self, saved: Tensor) -> None:
        if not _inside(saved, self.x) and _of(saved) not in self.elsewhere:
            self.storages[_of(saved)] = saved.untyped_storage().nbytes()

    @property
    def nbytes(self) -> int:
        return self.x.nbytes + sum(self.storages.values())

    @property
    def on_stage(self) -> int:
        return sum(round_up(size, LINE) for size in (self.x.nbytes, *self.storages.values()))


class Activations:
    """Chooses, before each step, whose activations stay from forward to backward, and where.

    bound: in bytes, of memory; swaps has that of the disk. Costs are measured when a layer is
    computed again for its backward, and depend on what it is given: what was not measured with
    tensors of such shapes is not kept. A plan knows those of the first layer; another that is given
    others than it was with these is computed again. may_keep: which layers can be.

    planned, peak: bytes of the last step, as chosen and as counted.
    """

    def __init__(self, bound: int, may_keep: Callable[[int], bool], swaps: Swaps) -> None:
        self.planned = self.peak = 0
        self._bound, self._may_keep, self._swaps = bound, may_keep, swaps
        self._swapped: set[Place] = set()
        self._inputs: list[tuple[Shape, _Form]] = []  # of the first layer, by micro-batch
        # By layer and input of the first one; with the form that the layer was given itself.
        self._costs: dict[tuple[int, tuple[Shape, _Form]], tuple[_Form, Cost]] = {}
        self._chosen: set[Place] = set()
        self._kept: dict[Place, _Kept] = {}
        self._used = 0

    def plan(self, layers: int, shapes: Sequence[Shape], given: Sequence[Any]) -> None:
        """Choose for a step.

        shapes: of the hidden states of each micro-batch. given: beside them, to the first layer.
        """
        self._chosen.clear()
        self._swapped.clear()
        self.planned = self.peak = self._used = 0
        if not self._bound:
            return
        self._inputs = list(zip(shapes, map(_form_of, given), strict=True))
        places = [(i, m) for i in range(layers) for m in range(len(shapes)) if self._may_keep(i)]
        found = {(i, m): self.cost(i, m) for i, m in places}
        costs = {place: cost for place, cost in found.items() if cost is not None}
        swaps = self._swaps
        self._chosen, self._swapped = shared_out(costs, self._bound, swaps.capacity, swaps.rate)
        self._used = self.peak = STAGES * _stage_of(costs, self._swapped)
        self.planned = self._used + sum(costs[place].nbytes for place in self._chosen)
        swaps.begin(_stage_of(costs, self._swapped))

    def keeps(self, i: int, m: int, given: Any) -> bool:
        """Whether a layer's activations stay, in memory or on disk.

        given: to it beside hidden states.
        """
        if (i, m) not in self._chosen and (i, m) not in self._swapped:
            return False
        return self._costs[i, self._inputs[m]][0] == _form_of(given)

    def has(self, i: int, m: int) -> bool:
        """Whether they are there."""
        return (i, m) in self._kept

    def keep(
        self,
        place: Place,
        hidden: Tensor,
        layer: nn.Module,
        given: Any,
        flat: Callable[[], Tensor],
        compute: Callable[[Tensor], tuple[Tensor, Any]],
    ) -> tuple[Tensor, Any]:
        """Compute a layer, and keep what its backward needs; returns what `compute` does.

        given: to the layer beside `hidden`, and to others too. flat: its weights that learn, which
        may lie elsewhere at its backward.
        """
        x = hidden.clone().requires_grad_()
        cost = self.cost(*place) if place in self._swapped else None
        stage = None if cost is None else self._swaps.stage(cost.on_stage)
        try:
            counting = self._counting(x, layer, given, flat, place, stage)
            with torch.enable_grad(), counting as tally:
                y, rest = compute(x)
        except BaseException:
            if stage is not None:
                self._swaps.drop(stage)
            raise
        nbytes = tally.nbytes if stage is None else 0
        self._kept[place] = _Kept(x, get_gradient_edge(y), nbytes)
        self._used += nbytes
        self.peak = max(self.peak, self._used)
        if stage is not None:
            x.data = x.new_full((), float("nan")).expand(x.shape)
            self._swaps.write(place, stage)
        return y.detach(), rest

    def turn(self, order: Iterable[Place]) -> None:
        """The backward pass begins, in this order."""
        self._swaps.order(order)

    def backward(self, i: int, m: int, grad: Tensor) -> Tensor:
        """The gradient of a kept layer's input; its activations are free then."""
        kept = self._kept.pop((i, m))
        torch.autograd.backward([kept.edge], [grad])
        if (i, m) in self._swapped:
            self._swaps.give_back((i, m))
        self._used -= kept.nbytes
        assert kept.x.grad is not None
        return kept.x.grad

    @contextmanager
    def measuring(
        self, place: Place, x: Tensor, layer: nn.Module, given: Any, flat: Callable[[], Tensor]
    ) -> Iterator[None]:
        """Measure a layer that is computed within, if its costs are wanted and not known."""
        if not self._bound:
            yield
            return
        i, m = place
        key, form = (i, self._inputs[m]), _form_of(given)
        if key in self._costs and self._costs[key][0] == form:
            yield
            return
        start = _now(x)
        with self._counting(x, layer, given, flat) as tally:
            yield
        self._costs[key] = form, Cost(tally.nbytes, _now(x) - start, tally.on_stage)

    def cost(self, i: int, m: int) -> Cost | None:
        """What was measured of a layer with such inputs as a micro-batch of this step has."""
        found = self._costs.get((i, self._inputs[m]))
        return None if found is None else found[1]

    def end(self) -> None:
        """Let go of all."""
        self._swaps.stop()
        self._kept.clear()
        self._chosen.clear()
        self._swapped.clear()

    @contextmanager
    def _counting(
        self,
        hidden: Tensor,
        layer: nn.Module,
        given: Any,
        flat: Callable[[], Tensor],
        place: Place = (0, 0),
        stage: Stage | None = None,
    ) -> Iterator[_Tally]:
        """Count what is saved within, and copy it to a stage where there is one."""
        weights = flat()
        others = [*layer.parameters(), *layer.buffers(), *tree_leaves(given)]
        there = {_of(x) for x in others if isinstance(x, Tensor)} | {_of(weights)}
        tally = _Tally(hidden, there)

        def weight(start: int, shape: torch.Size, stride: tuple[int, ...]) -> Tensor:
            found = flat()
            return found.as_strided(shape, stride, found.storage_offset() + start)

        def pack(x: Tensor) -> Callable[[], Tensor]:
            if _inside(x, weights):
                start = int(x.storage_offset() - weights.storage_offset())
                return partial(weight, start, x.shape, x.stride())
            tally.add(x)
            if stage is None or _of(x) in there or x.device != stage.memory.device:
                return x.detach
            found = x.detach()
            taken = stage.take(found)
            if taken is None:
                return found.detach
            return lambda: self._swaps.read(place).at(*taken)

        with saved_tensors_hooks(pack, lambda found: found()):
            yield tally


def shared_out(
    costs: Mapping[Place, Cost], bound: int, disk: int, rate: float
) -> tuple[set[Place], set[Place]]:
    """Those to keep in `bound` bytes of memory, and those to swap to `disk` bytes of disk.

    rate: of the disk, bytes per second there and back, as if nothing were computed meanwhile. First
    memory is filled with what saves most against the next best way, and then the disk.
    """
    alone = chosen(costs, bound)
    each = {place: cost.on_stage / rate for place, cost in costs.items()} if disk else {}
    faster = {place for place, seconds in each.items() if seconds < costs[place].seconds}
    room = bound - STAGES * _stage_of(costs, faster)
    if not faster or room < 0:
        return alone, set()
    gains = {
        place: Cost(cost.nbytes, min(cost.seconds, each[place])) for place, cost in costs.items()
    }
    kept = chosen(gains, room)
    left = {
        place: Cost(round_up(costs[place].on_stage, PAGE), costs[place].seconds - each[place])
        for place in sorted(faster - kept)
    }
    swapped = chosen(left, disk)
    gain = sum(costs[place].seconds for place in kept)
    gain += sum(left[place].seconds for place in swapped)
    if gain <= sum(costs[place].seconds for place in alone):
        return alone, set()
    return kept, swapped


def _stage_of(costs: Mapping[Place, Cost], places: Iterable[Place]) -> int:
    return max((round_up(costs[place].on_stage, PAGE) for place in places), default=0)


def chosen(costs: Mapping[Place, Cost], bound: int) -> set[Place]:
    """Those to keep in `bound` bytes, so that least time goes to computing others again.

    The 0/1 knapsack problem, by dynamic programming over bytes: exact but for rounding each up to
    1/2048 of the bound.
    """
    total = sum(cost.nbytes for cost in costs.values())
    if total <= bound:
        return set(costs)
    unit = max(1, -(-bound // _BUCKETS))
    room = bound // unit
    best, took = np.zeros(room + 1), list[tuple[Place, int, Any]]()
    for place, cost in costs.items():
        size = -(-cost.nbytes // unit)
        if size > room:
            continue
        with_it = np.concatenate([np.full(size, -1.0), best[: room + 1 - size] + cost.seconds])
        took.append((place, size, with_it > best))
        best = np.maximum(best, with_it)
    found, at = set(), room
    for place, size, better in reversed(took):
        if better[at]:
            found.add(place)
            at -= size
    return found


def _now(x: Tensor) -> float:
    """Seconds, when all has been computed on the device of a tensor."""
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    return time.perf_counter()


def _form_of(given: Any) -> _Form:
    return tuple((x.shape, x.dtype) if isinstance(x, Tensor) else None for x in tree_leaves(given))


def _of(x: Tensor) -> int:
    """A tensor's storage, whether it has memory or none."""
    return int(x.untyped_storage()._cdata)


def _inside(x: Tensor, memory: Tensor) -> bool:
    """Whether x begins in contiguous memory."""
    first = int(x.storage_offset()) * x.itemsize - int(memory.storage_offset()) * memory.itemsize
    return _of(x) == _of(memory) and 0 <= first < memory.nbytes
