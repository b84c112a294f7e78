"""The passes of all micro-batches on their way through the layers, one layer after another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from .boundaries import Boundaries
from .generators import Generators
from .passes import (
    Stop,
    TrainingPass,
    let_go,
    next_stop,
    reads_embeddings,
    share,
    stop_of,
    storage_of,
)

_NONE = torch.empty(0)


class Walk:
    """What each pass was given at each layer, beside hidden states: those are in `boundaries`.

    stops: by layer and micro-batch. edges: of embeddings that learn, by micro-batch.
    """

    def __init__(
        self, model: nn.Module, layers: int, boundaries: Boundaries, generators: Generators
    ) -> None:
        self._model, self._layers, self._boundaries = model, layers, boundaries
        self._generators = generators
        self._reads_embeddings: bool | None = None  # None: not known yet
        self._callers: set[int] = set()  # storages of the batches
        self.stops: dict[tuple[int, int], Stop] = {}
        self.edges: dict[int, GradientEdge] = {}

    def start(
        self, passes: Sequence[TrainingPass], batches: Sequence[Mapping[str, Tensor]]
    ) -> None:
        """Have all come to the first layer."""
        if self._reads_embeddings is None:
            with self._generators.forked():
                self._reads_embeddings = reads_embeddings(self._model, batches[0], self._layers)
        given = (x for batch in batches for x in batch.values() if isinstance(x, Tensor))
        self._callers = {storage_of(x) for x in given}
        for m, one in enumerate(passes):
            stop = stop_of(one.advance(), 0)
            if stop.hidden.requires_grad:
                self.edges[m] = get_gradient_edge(stop.hidden)
            self._boundaries.put(0, m, stop.hidden)
            if not self._reads_embeddings:
                let_go(stop)
            self._reached(0, m, stop)

    def go_on(
        self, one: TrainingPass, i: int, m: int, y: Tensor, whole: Callable[[Tensor], Any]
    ) -> None:
        """Take what layer i has computed, and have a pass come to the next one.

        Raises UnsupportedModelError where the model changes hidden states between them.
        """
        hidden = self._boundaries.put(i + 1, m, y)
        self._reached(i + 1, m, next_stop(one, whole(hidden), hidden, i + 1))

    def given(self, i: int, m: int, count: int) -> Tensor:
        """The hidden states that layer i is given, in a pass forward of so many micro-batches."""
        at = i * count + m
        after = range(at + 1, min(at + 3, self._layers * count))
        return self._boundaries.given(i, m, [divmod(n, count) for n in after])

    def end(self) -> None:
        """Forget all."""
        self.stops.clear()
        self.edges.clear()

    def _reached(self, i: int, m: int, stop: Stop) -> None:
        if m:
            share(stop, self.stops[i, 0], self._callers)
        self.stops[i, m] = stop._replace(hidden=_NONE)
