"""Passes over weights that all stay: from the embedding to the logits as one recording, or list."""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Sequence
from typing import Any, TypeAlias

from torch import Tensor

from qoff.kernels.layout.ending import Ending
from qoff.memory import HEAD, Unit, Weights
from qoff.models.forward_pass import ForwardPass
from qoff.models.spec import DecoderSpec

from .following import Following
from .graphs import Replays
from .linear import Steps
from .rows import taken

# A pass over these tokens, int64 [M], unit by unit; the rows whose logits are wanted, None: all.
Compute: TypeAlias = Callable[[ForwardPass, Tensor, Tensor | None], Steps]


class WholePasses:
    """Passes whose hidden states and KV cache stay where they are, too.

    ending: what makes logits of what `compute` returns.
    """

    def __init__(
        self, spec: DecoderSpec, replays: Replays, compute: Compute, ending: Ending
    ) -> None:
        self._units: list[Unit] = [*range(spec.num_layers), HEAD]
        self._replays, self._compute = replays, compute
        self._alike: Any = None  # `kernels.cpu.jit.alike.AlikeLayers`
        self.following = Following(spec, replays, ending)

    def recorded(self, run: ForwardPass, key: Hashable) -> Steps:
        """Compute a pass as its recording, or record it: when all its weights are there."""
        weights = yield from self._weights()
        key = (*map(id, weights), key)

        def work(ids: Tensor) -> Tensor:
            return given(self._compute(run, ids, None), weights)

        logits = self._replays.run(key, weights, run.tokens, work)
        self.following.note(run, key, weights)
        run.hidden = None
        return taken(logits[: run.ragged.tokens], run.logit_rows)

    def can_defer(self, run: ForwardPass) -> bool:
        """Whether ops may compute later, as nothing but ops has to do with what they do."""
        by_jobs = self._replays.while_done is not None and run.states is None
        return by_jobs and all(part.cached and part.cached.in_place for part in run.parts)

    def deferred(self, run: ForwardPass, ids: Tensor) -> Steps:
        """Compute a pass, of prompts for example, whose numbers no other will have.

        Its layers may follow from the first ones; not those of adapters, which may add to any.
        """
        weights = yield from self._weights()
        by_jobs = self._replays.while_done
        assert by_jobs is not None
        kind = tuple(part.cached.layers_key() for part in run.parts if part.cached is not None)
        if None not in kind and run.adapters is None:
            if self._alike is None or self._alike.stale:
                self._alike = by_jobs.alike_layers(len(self._units) - 1)
            run.layers = self._alike.of_pass(kind)
        with by_jobs.deferring():
            logits = given(self._compute(run, ids, run.logit_rows), weights)
        run.layers = None
        return logits

    def _weights(self) -> Generator[Unit, Weights, list[Weights]]:
        """The weights of all units."""
        weights: list[Weights] = []
        for unit in self._units:
            weights.append((yield unit))
        return weights


def given(steps: Steps, weights: Sequence[Weights]) -> Tensor:
    """What steps over all units return that are given these weights, which need no others."""
    next(steps)
    for some in weights[:-1]:
        steps.send(some)
    try:
        steps.send(weights[-1])
    except StopIteration as finished:
        return finished.value
    raise AssertionError("the head streams")
