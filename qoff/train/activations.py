"""What layers save for their backward: kept where a bound of bytes allows, else computed again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.utils._pytree import tree_leaves

_BUCKETS = 2048  # of bytes, in the plan
Place: TypeAlias = tuple[int, int]  # layer and micro-batch
Shape: TypeAlias = tuple[torch.Size, torch.dtype]


@dataclass(frozen=True)
class Cost:
    """Of a layer with inputs of a shape: bytes that its backward needs, seconds of its forward."""

    nbytes: int
    seconds: float


@dataclass(frozen=True)
class _Kept:
    x: Tensor
    edge: GradientEdge
    nbytes: int


@dataclass
class _Tally:
    """Memory that a layer saves, each once, but for what is there anyway; and its input."""

    x: Tensor
    elsewhere: set[int]  # addresses of storages
    storages: dict[int, int] = field(default_factory=dict)

    def add(self, saved: Tensor) -> None:
        storage, first = saved.untyped_storage(), self.x.data_ptr()
        inside = first <= saved.data_ptr() < first + self.x.nbytes
        if not inside and storage.data_ptr() not in self.elsewhere:
            self.storages[storage.data_ptr()] = storage.nbytes()

    @property
    def nbytes(self) -> int:
        return self.x.nbytes + sum(self.storages.values())


class Activations:
    """Chooses, before each step, whose activations stay from forward to backward.

    bound: in bytes. Costs are measured when a layer is computed again for its backward; what was
    not measured with a shape is not kept. may_keep: which layers can be: not those whose packed
    weights move without being bound to parameters.

    planned, peak: bytes of the last step, as chosen and as counted.
    """

    def __init__(self, bound: int, may_keep: Callable[[int], bool]) -> None:
        self.planned = self.peak = 0
        self._bound, self._may_keep = bound, may_keep
        self._costs: dict[tuple[int, Shape], Cost] = {}
        self._chosen: set[Place] = set()
        self._kept: dict[Place, _Kept] = {}
        self._used = 0

    def plan(self, layers: int, shapes: Sequence[Shape]) -> None:
        """Choose for a step. shapes: of the hidden states of each micro-batch."""
        self._chosen.clear()
        self.planned = self.peak = self._used = 0
        if not self._bound:
            return
        places = [(i, m) for i in range(layers) for m in range(len(shapes)) if self._may_keep(i)]
        found = {(i, m): self._costs.get((i, shapes[m])) for i, m in places}
        costs = {place: cost for place, cost in found.items() if cost is not None}
        self._chosen = chosen(costs, self._bound)
        self.planned = sum(costs[place].nbytes for place in self._chosen)

    def keeps(self, i: int, m: int) -> bool:
        return (i, m) in self._chosen

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
        with torch.enable_grad(), self._counting(x, layer, given, flat) as tally:
            y, rest = compute(x)
        self._kept[place] = _Kept(x, get_gradient_edge(y), tally.nbytes)
        self._used += tally.nbytes
        self.peak = max(self.peak, self._used)
        return y.detach(), rest

    def backward(self, i: int, m: int, grad: Tensor) -> Tensor:
        """The gradient of a kept layer's input; its activations are free then."""
        kept = self._kept.pop((i, m))
        torch.autograd.backward([kept.edge], [grad])
        self._used -= kept.nbytes
        assert kept.x.grad is not None
        return kept.x.grad

    @contextmanager
    def measuring(
        self, i: int, x: Tensor, layer: nn.Module, given: Any, flat: Callable[[], Tensor]
    ) -> Iterator[None]:
        """Measure a layer that is computed within, if its costs are wanted and not known."""
        key = i, (x.shape, x.dtype)
        if not self._bound or key in self._costs:
            yield
            return
        start = time.perf_counter()
        with self._counting(x, layer, given, flat) as tally:
            yield
        self._costs[key] = Cost(tally.nbytes, time.perf_counter() - start)

    def end(self) -> None:
        """Let go of all."""
        self._kept.clear()
        self._chosen.clear()

    @contextmanager
    def _counting(
        self, hidden: Tensor, layer: nn.Module, given: Any, flat: Callable[[], Tensor]
    ) -> Iterator[_Tally]:
        weights = flat()
        first, last = weights.data_ptr(), weights.data_ptr() + weights.nbytes
        others = [*layer.parameters(), *layer.buffers(), *tree_leaves(given)]
        there = {_of(x) for x in others if isinstance(x, Tensor)} | {_of(weights)}
        tally = _Tally(hidden, there)

        def pack(x: Tensor) -> Any:
            if first <= x.data_ptr() < last:
                start = (x.data_ptr() - first) // weights.itemsize
                return start, x.shape, x.stride()
            tally.add(x)
            return x.detach()

        def unpack(packed: Any) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            start, shape, stride = packed
            found = flat()
            return found.as_strided(shape, stride, found.storage_offset() + start)

        with saved_tensors_hooks(pack, unpack):
            yield tally


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


def _of(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()
