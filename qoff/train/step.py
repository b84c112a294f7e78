"""One step of training: units forward and then in reverse, all micro-batches at each."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from qoff.errors import UnsupportedModelError

from .activations import Activations
from .boundaries import Boundaries
from .frozen import FrozenWeights
from .gradients import Gradients
from .head import FusedHead
from .homes import Home
from .layout import FlatUnit
from .optimizers import Optimizer
from .passes import Stop, StoppingLayer, TrainingPass
from .slots import WeightSlots
from .updates import Updater

Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class Parts:
    """What a step works with. units: the layers', then that of what is outside of them.

    outer: the flat weights of the last unit, which stay. kept: homes of all weights and states.
    """

    model: nn.Module
    head: FusedHead
    units: Sequence[FlatUnit]
    outer: Tensor
    weights: WeightSlots
    frozen: FrozenWeights
    boundaries: Boundaries
    activations: Activations
    gradients: Gradients
    updater: Updater
    kept: Sequence[Home]


class Engine:
    """Computes steps on a model, whose layers stop from now on (`passes`)."""

    def __init__(self, parts: Parts, layers: Sequence[nn.Module]) -> None:
        self.parts = parts
        self.layers = [StoppingLayer(x, i, self._alone) for i, x in enumerate(layers)]
        for i, layer in enumerate(self.layers):
            layer.own = parts.frozen.forward_of(i, layer.own)
        self.changing = False  # whether a step has begun to change weights, and has not ended
        self._flat: dict[int, Tensor] = {}  # of units that are held
        self._random: dict[tuple[int, int], Tensor] = {}
        self._stops: dict[tuple[int, int], Stop] = {}
        self._edges: dict[int, GradientEdge] = {}

    def step(
        self,
        batches: Sequence[Batch],
        shares: Sequence[float],
        optimizer: Optimizer,
        number: int,
        max_norm: float | None,
    ) -> tuple[float, float | None]:
        """The loss, and the norm of all gradients where `max_norm` bounds it; steps the weights.

        shares: of each micro-batch in the loss. Where loss or norm are not finite, weights stay as
        they are.
        """
        parts, last = self.parts, len(self.layers) - 1
        passes = [
            TrainingPass(partial(self._loss, batch, share), share)
            for batch, share in zip(batches, shares, strict=True)
        ]
        try:
            outer = parts.gradients.begin()
            parts.weights.begin([*range(last + 1), *reversed(range(last))])
            loss = self._forward(passes, batches)
            if not math.isfinite(loss):
                return loss, None
            clips, random = max_norm is not None, torch.get_rng_state()
            rate = optimizer.rate(number)
            rule = optimizer.rule(number, rate, 1.0)
            done = self._backward(len(passes), None if clips else partial(self._update, rule))
            torch.set_rng_state(random)
            for m, edge in self._edges.items():
                torch.autograd.backward([edge], [parts.boundaries.at(m)])
            norm = parts.gradients.norm() if clips else None
            if max_norm is not None and norm is not None:
                if not math.isfinite(norm):
                    return loss, norm
                scale = min(1.0, max_norm / (norm + 1e-6))  # as torch's
                rule = optimizer.rule(number, rate, scale)
                done = self._update_all(partial(self._update, rule))
            self.changing = True
            unit = parts.units[-1]
            done.append(
                parts.updater.submit(last + 1, unit, rule, parts.outer, lambda: outer, _nothing)
            )
            for update in done:
                update.result()
            parts.weights.settle()
            self.changing = False
            return loss, norm
        finally:
            self._end(passes)

    def evaluate(self, batches: Sequence[Batch]) -> list[float]:
        """The loss of each, without gradients; as many as a step takes, all at each layer."""
        boundaries, last = self.parts.boundaries, len(self.layers) - 1
        passes = [TrainingPass(partial(self._loss, x, 1.0), 1.0, False) for x in batches]
        losses: list[float] = []
        try:
            self.parts.weights.begin(range(last + 1))
            stops = [self._stop_of(one.advance(), 0) for one in passes]
            for i in range(last + 1):
                self._hold(i)
                for m, one in enumerate(passes):
                    with torch.no_grad():
                        y, whole = self.layers[i].compute(stops[m].hidden, stops[m])
                    reached = one.advance(whole(boundaries.put(m, y)))
                    if i < last:
                        stops[m] = self._stop_of(reached, i + 1)
                    else:
                        losses.append(float(reached))
                self._release(i)
            return losses
        finally:
            self._end(passes)

    def _forward(self, passes: Sequence[TrainingPass], batches: Sequence[Batch]) -> float:
        """All layers, and losses with their backward to the last layer; the last one stays held."""
        boundaries, last = self.parts.boundaries, len(self.layers) - 1
        for m, one in enumerate(passes):
            stop = self._stop_of(one.advance(), 0)
            if stop.hidden.requires_grad:
                self._edges[m] = get_gradient_edge(stop.hidden)
            boundaries.put(m, stop.hidden)
            self._stops[0, m] = stop._replace(hidden=_NONE)
        hiddens = [boundaries.at(m) for m in range(len(passes))]
        self.parts.activations.plan(last + 1, [(x.shape, x.dtype) for x in hiddens])
        losses = []
        for i in range(last + 1):
            self._hold(i)
            for m, one in enumerate(passes):
                y, whole = self._compute(i, m)
                hidden = boundaries.put(m, y)
                del y
                if i < last:
                    version = hidden._version
                    stop = self._stop_of(one.advance(whole(hidden)), i + 1)
                    if not _is_same(stop.hidden, hidden) or hidden._version != version:
                        raise UnsupportedModelError(
                            f"this model changes hidden states between layer {i} and the next; "
                            "it cannot be trained by streaming"
                        )
                    self._stops[i + 1, m] = stop._replace(hidden=_NONE)
                    continue
                hidden = hidden.data.requires_grad_()
                try:
                    loss = one.advance(whole(hidden))
                except Exception as error:
                    if not self.parts.head.give_up(one, error):
                        raise
                    loss = self._loss_again(batches[m], one.share, whole, hidden)
                loss.backward()
                losses.append(float(loss.detach()))
                assert hidden.grad is not None
                boundaries.put(m, hidden.grad)
            if i < last:
                self._release(i)
        return math.fsum(losses)

    def _compute(self, i: int, m: int) -> tuple[Tensor, Callable[[Tensor], Any]]:
        """A layer forward; what its backward needs is kept, or its input, to compute it again."""
        boundaries, activations = self.parts.boundaries, self.parts.activations
        layer, stop = self.layers[i], self._stops[i, m]
        if activations.keeps(i, m):
            given = stop.args, stop.kwargs
            return activations.keep(
                (i, m),
                boundaries.at(m),
                layer.module,
                given,
                lambda: self._flat[i],
                lambda x: layer.compute(x, stop),
            )
        boundaries.save(i, m)
        self._random[i, m] = torch.get_rng_state()
        with torch.no_grad():
            return layer.compute(boundaries.at(m), stop)

    def _again(self, i: int, m: int, ahead: Sequence[tuple[int, int]]) -> Tensor:
        """A layer once more and backward; returns the gradient of its input."""
        boundaries, layer = self.parts.boundaries, self.layers[i]
        stop = self._stops[i, m]
        x = boundaries.load(i, m, ahead).data.requires_grad_()
        torch.set_rng_state(self._random.pop((i, m)))
        measuring = self.parts.activations.measuring(
            i, x, layer.module, (stop.args, stop.kwargs), lambda: self._flat[i]
        )
        with torch.enable_grad(), measuring:
            y, _ = layer.compute(x, stop)
        torch.autograd.backward(y, boundaries.at(m))
        assert x.grad is not None
        return x.grad

    def _backward(self, count: int, update: Any) -> list[Future[None]]:
        """All layers in reverse; `update` is called with each that is complete."""
        done: list[Future[None]] = []
        boundaries, gradients = self.parts.boundaries, self.parts.gradients
        kept = self.parts.activations
        order = [(i, m) for i in reversed(range(len(self.layers))) for m in range(count)]
        inputs = deque(place for place in order if not kept.has(*place))
        for i, m in order:
            if m == 0:
                self._hold(i)
                gradients.open(i)
            if kept.has(i, m):
                grad = kept.backward(i, m, boundaries.at(m))
            else:
                inputs.popleft()
                grad = self._again(i, m, list(islice(inputs, 2)))
            del self._stops[i, m]
            boundaries.put(m, grad)
            if m == count - 1:
                gradients.close(i)
                if update is None:
                    self._release(i)
                else:
                    self.parts.frozen.release(i)
                    done.append(update(i))
        return done

    def _update(self, rule: Any, i: int) -> Future[None]:
        """Step a unit that is held, which is given back then."""
        parts, flat = self.parts, self._flat.pop(i)
        if parts.weights.moves(i):
            parts.units[i].bind(None)
        self.changing = True

        def after() -> None:
            parts.gradients.give_back(i)
            parts.weights.write_back(i)

        return parts.updater.submit(
            i, parts.units[i], rule, flat, partial(parts.gradients.take, i), after
        )

    def _update_all(self, update: Any) -> list[Future[None]]:
        """Step all layers, whose weights come once more."""
        order = list(reversed(range(len(self.layers))))
        self.parts.weights.begin(order)
        done = []
        for i in order:
            self._flat[i] = self.parts.units[i].flat(self.parts.weights.acquire(i))
            done.append(update(i))
        return done

    def _hold(self, i: int) -> None:
        if i in self._flat:
            return
        unit, weights = self.parts.units[i], self.parts.weights
        self._flat[i] = unit.flat(weights.acquire(i))
        if weights.moves(i):
            unit.bind(self._flat[i])
        self.parts.frozen.hold(i)

    def _release(self, i: int) -> None:
        del self._flat[i]
        self.parts.frozen.release(i)
        if self.parts.weights.moves(i):
            self.parts.units[i].bind(None)
            self.parts.weights.release(i)

    def _loss(self, batch: Batch, share: float) -> Tensor:
        found = self.parts.model(**batch, use_cache=False, return_dict=True)
        return self.parts.head.share_of(found.loss, share)

    def _loss_again(
        self, batch: Batch, share: float, whole: Callable[[Tensor], Any], hidden: Tensor
    ) -> Tensor:
        """The loss of hidden states behind all layers, in a pass of its own that computes none."""
        self.parts.gradients.begin()
        again = TrainingPass(partial(self._loss, batch, share), share)
        with torch.random.fork_rng(devices=[]):
            stop = self._stop_of(again.advance(), 0)
            for i in range(1, len(self.layers)):
                stop = self._stop_of(again.advance(whole(stop.hidden)), i)
            loss: Tensor = again.advance(whole(hidden))
        return loss

    def _stop_of(self, reached: Any, index: int) -> Stop:
        if isinstance(reached, Stop) and reached.layer == index:
            return reached
        where = f"layer {reached.layer}" if isinstance(reached, Stop) else "its loss"
        raise UnsupportedModelError(
            f"this model computes {where} where layer {index} was expected; only models that go "
            "through all layers in order can be trained by streaming"
        )

    def each_unit(self) -> Iterator[tuple[int, FlatUnit, Tensor]]:
        """Number, unit and flat weights of each, until the next."""
        parts, last = self.parts, len(self.layers)
        parts.weights.begin(range(last))
        try:
            for i, unit in enumerate(parts.units[:-1]):
                yield i, unit, unit.flat(parts.weights.acquire(i))
                parts.weights.release(i)
        finally:
            parts.weights.stop()
        yield last, parts.units[-1], parts.outer

    @contextmanager
    def _held(self, i: int) -> Iterator[None]:
        self.parts.weights.begin([i])
        try:
            self._hold(i)
            yield
        finally:
            if i in self._flat:
                self._release(i)
            self.parts.weights.stop()  # a read that has failed is forgotten

    def _alone(self, i: int, *args: Any, **kwargs: Any) -> Any:
        """A layer outside of a step, without gradients."""
        with self._held(i), torch.no_grad():
            return self.layers[i].own(*args, **kwargs)

    def _end(self, passes: Sequence[TrainingPass]) -> None:
        """Leave everything as before a step, whatever has happened."""
        parts = self.parts
        for one in passes:
            one.end()
        parts.updater.wait()
        parts.boundaries.stop()
        parts.activations.end()
        parts.gradients.end()
        for i in list(self._flat):
            self._release(i)
        parts.frozen.end()
        parts.weights.stop()
        for kept in (self._random, self._stops, self._edges):
            kept.clear()


_NONE = torch.empty(0)


def _is_same(found: Tensor, given: Tensor) -> bool:
    """Whether these are the same elements in the same memory."""
    return (found.data_ptr(), found.shape, found.stride(), found.dtype) == (
        given.data_ptr(),
        given.shape,
        given.stride(),
        given.dtype,
    )


def _nothing() -> None:
    """What follows an update of what stays."""
