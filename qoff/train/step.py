"""One step of training: units forward and then in reverse, all micro-batches at each."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .activations import Activations
from .boundaries import Boundaries
from .generators import Generators, State
from .gradients import Gradients
from .head import FusedHead
from .held import HeldUnits
from .homes import Home
from .optimizers import Optimizer
from .passes import StoppingLayer, TrainingPass, stop_of
from .stepping import Stepping
from .updates import Updater
from .walk import Walk

Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class Parts:
    """What a step works with. states: homes of all that is kept beside weights of layers and tiles.

    device: that computes.
    """

    model: nn.Module
    head: FusedHead
    held: HeldUnits
    boundaries: Boundaries
    activations: Activations
    gradients: Gradients
    updater: Updater
    steps: Stepping
    states: Sequence[Home]
    device: torch.device
    generators: Generators

    @property
    def kept(self) -> list[Home]:
        """Homes of all weights and states, and of gradients that wait."""
        return [*self.held.weights.places, *self.states, *self.steps.tiles.kept]


class Engine:
    """Computes steps on a model, whose layers stop from now on (`passes`)."""

    def __init__(self, parts: Parts, layers: Sequence[nn.Module]) -> None:
        self.parts = parts
        self.layers = [StoppingLayer(x, i, self._alone) for i, x in enumerate(layers)]
        for i, layer in enumerate(self.layers):
            layer.own = parts.held.frozen.forward_of(i, layer.own)
        self._random: dict[tuple[int, int], State] = {}
        self._state: State | None = None
        self._walk = Walk(parts.model, len(layers), parts.boundaries, parts.generators)

    def step(
        self,
        batches: Sequence[Batch],
        shares: Sequence[float],
        optimizer: Optimizer,
        number: int,
        max_norm: float | None,
        loss_scale: float,
    ) -> tuple[float, float | None]:
        """The loss, and the norm of all gradients where they are kept; steps the weights.

        shares: of each micro-batch in the loss. loss_scale: of what is behind the loss in the
        backward pass. Where loss or norm are not finite, weights stay as they are.
        """
        parts, held, last = self.parts, self.parts.held, len(self.layers) - 1
        passes = [
            TrainingPass(partial(self._loss, batch, share * loss_scale), share * loss_scale)
            for batch, share in zip(batches, shares, strict=True)
        ]
        steps = parts.steps
        try:
            steps.begin(optimizer)
            parts.gradients.begin()
            held.begin([*range(last + 1), *reversed(range(last))])
            loss = self._forward(passes, batches) / loss_scale
            if not math.isfinite(loss):
                return loss, None
            waits, random = parts.gradients.are_kept, parts.generators.state()
            rate = optimizer.rate(number)
            rule = optimizer.rule(number, rate, 1 / loss_scale)
            self._backward(len(passes), None if waits else partial(steps.unit, rule))
            parts.generators.restore(random)
            for m, edge in self._walk.edges.items():
                torch.autograd.backward([edge], [parts.boundaries.gradient(m)])
            parts.gradients.close_outer()
            norm = parts.gradients.norm(steps.tiles.squares) / loss_scale if waits else None
            if norm is not None:
                if not math.isfinite(norm):
                    return loss, norm
                clip = 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))  # as torch
                if steps.later(number, clip / loss_scale):
                    return loss, norm
                rule = optimizer.rule(number, rate, clip / loss_scale)
                steps.all_units(rule)
            steps.finish(rule)
            return loss, norm
        finally:
            try:
                steps.settle()  # whatever has become of this step
            finally:
                self._end(passes)

    def evaluate(self, batches: Sequence[Batch]) -> list[float]:
        """The loss of each, without gradients; as many as a step takes, all at each layer."""
        last = len(self.layers) - 1
        passes = [TrainingPass(partial(self._loss, x, 1.0), 1.0, False) for x in batches]
        losses: list[float] = []
        try:
            self.parts.held.begin(range(last + 1))
            self._walk.start(passes, batches)
            for i in range(last + 1):
                self.parts.held.hold(i)
                for m, one in enumerate(passes):
                    x = self._walk.given(i, m, len(passes))
                    with torch.no_grad():
                        y, whole = self.layers[i].compute(x, self._walk.stops.pop((i, m)))
                    if i < last:
                        self._walk.go_on(one, i, m, y, whole)
                    else:
                        losses.append(float(one.advance(whole(y))))
                    del y
                self.parts.held.release(i)
            return losses
        finally:
            self._end(passes)

    def _forward(self, passes: Sequence[TrainingPass], batches: Sequence[Batch]) -> float:
        """All layers, and losses with their backward to the last layer; the last one stays held."""
        boundaries, last = self.parts.boundaries, len(self.layers) - 1
        self._walk.start(passes, batches)
        first = [self._walk.stops[0, m] for m in range(len(passes))]
        self.parts.activations.plan(
            last + 1, boundaries.forms(len(passes)), [(x.args, x.kwargs) for x in first]
        )
        losses: list[Tensor] = []
        for i in range(last + 1):
            self.parts.held.hold(i)
            if i == last:
                self.parts.steps.ready(last + 1)
            for m, one in enumerate(passes):
                y, whole = self._compute(i, m, len(passes))
                if i < last:
                    self._walk.go_on(one, i, m, y, whole)
                    del y
                    continue
                hidden = y.detach().requires_grad_()
                del y
                try:
                    loss = one.advance(whole(hidden))
                except Exception as error:
                    if not self.parts.head.give_up(one, error):
                        raise
                    loss = self._loss_again(batches[m], one.share, whole, hidden)
                loss.backward()
                losses.append(loss.detach())
                assert hidden.grad is not None
                boundaries.put_gradient(m, hidden.grad)
                del hidden, loss
            if i < last:
                self.parts.held.release(i)
        return math.fsum(map(float, losses))

    def _compute(self, i: int, m: int, count: int) -> tuple[Tensor, Callable[[Tensor], Any]]:
        """A layer forward; what its backward needs is kept, or its input, to compute it again."""
        boundaries, activations = self.parts.boundaries, self.parts.activations
        layer, stop = self.layers[i], self._walk.stops[i, m]
        x = self._walk.given(i, m, count)
        given = stop.args, stop.kwargs
        if activations.keeps(i, m, given):
            return activations.keep(
                (i, m),
                x,
                layer.module,
                given,
                lambda: self.parts.held.flat(i),
                lambda x: layer.compute(x, stop),
            )
        boundaries.save(i, m)
        self._random[i, m] = self._generator()
        with torch.no_grad():
            return layer.compute(x, stop)

    def _generator(self) -> State:
        """The state of generators; the last one where it has not changed.

        Many small tensors that stay, between large ones that go, would have the heap grow.
        """
        now = self.parts.generators.state()
        if self._state is None or not all(map(torch.equal, now, self._state)):
            self._state = now
        return self._state

    def _again(self, i: int, m: int, given: Tensor, grad: Tensor) -> Tensor:
        """A layer once more and backward; returns the gradient of its input."""
        layer, stop = self.layers[i], self._walk.stops[i, m]
        x = given.data.requires_grad_()
        self.parts.generators.restore(self._random.pop((i, m)))
        measuring = self.parts.activations.measuring(
            (i, m), x, layer.module, (stop.args, stop.kwargs), lambda: self.parts.held.flat(i)
        )
        with torch.enable_grad(), measuring:
            y, _ = layer.compute(x, stop)
        torch.autograd.backward(y, grad)
        assert x.grad is not None
        return x.grad

    def _backward(self, count: int, update: Callable[[int], None] | None) -> None:
        """All layers in reverse; `update` is called with each that is complete."""
        boundaries, gradients = self.parts.boundaries, self.parts.gradients
        kept = self.parts.activations
        order = [(i, m) for i in reversed(range(len(self.layers))) for m in range(count)]
        kept.turn(order)
        for at, (i, m) in enumerate(order):
            if m == 0:
                self.parts.held.hold(i)
                self.parts.steps.ready(i)
                gradients.open(i)
            x, grad = boundaries.back(i, m, order[at + 1 : at + _AHEAD], kept.has)
            found = kept.backward(i, m, grad) if x is None else self._again(i, m, x, grad)
            del self._walk.stops[i, m], x, grad
            if i or self._walk.edges:
                boundaries.put_gradient(m, found)
            del found
            if m == count - 1:
                gradients.close(i)
                if update is None:
                    self.parts.held.release(i)
                else:
                    update(i)

    def _loss(self, batch: Batch, share: float) -> Tensor:
        found = self.parts.model(**batch, use_cache=False, return_dict=True)
        return self.parts.head.share_of(found.loss, share)

    def _loss_again(
        self, batch: Batch, share: float, whole: Callable[[Tensor], Any], hidden: Tensor
    ) -> Tensor:
        """The loss of hidden states behind all layers, in a pass of its own that computes none."""
        self.parts.gradients.begin()
        self.parts.steps.tiles.begin()  # the fused head has added to its own
        again = TrainingPass(partial(self._loss, batch, share), share)
        with self.parts.generators.forked():
            stop = stop_of(again.advance(), 0)
            for i in range(1, len(self.layers)):
                stop = stop_of(again.advance(whole(stop.hidden)), i)
            loss: Tensor = again.advance(whole(hidden))
        return loss

    def _alone(self, i: int, *args: Any, **kwargs: Any) -> Any:
        """A layer outside of a step, without gradients."""
        with self.parts.held.alone(i), torch.no_grad():
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
        parts.steps.tiles.end()
        parts.held.end()
        self._random.clear()
        self._walk.end()


_AHEAD = 8  # inputs that are looked at for what to read next
