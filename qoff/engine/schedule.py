"""The block schedule: layers outer, batches inner."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from torch import Tensor

from qoff.memory import Unit, WeightStore
from qoff.memory.instrumentation import PLAIN, Instrumentation
from qoff.memory.plan import unit_label
from qoff.models.forward_pass import ForwardPass
from qoff.models.runtime import AnyDecoder, followed

_AHEAD = 2  # turns whose KV cache is brought meanwhile


class Schedule:
    """Runs rounds: each pass once through the model.

    In the block schedule (FlexGen's zig-zag) all passes use a unit's weights before the next unit
    comes; in the sequential one each pass goes through all units alone. While one pass is computed,
    weights of the next unit and KV cache and hidden states of the next pass are on their way.
    """

    def __init__(
        self,
        decoder: AnyDecoder,
        store: WeightStore,
        schedule: str,
        instrumentation: Instrumentation = PLAIN,
    ) -> None:
        self._decoder = decoder
        self._store = store
        self._schedule = schedule
        self._span = instrumentation.span
        self._follows = instrumentation.timeline is None
        self._after: dict[Unit, Unit] = {}  # which unit a pass asks for after each

    def round(self, passes: Sequence[ForwardPass]) -> list[Tensor]:
        """Return the logits of each pass, float32 [R, vocab_size]."""
        if len(passes) == 1 and self._follows:
            logits = followed(self._decoder, self._store, passes[0])
            if logits is not None:
                return [logits]
        if self._schedule == "sequential":
            return [self._together([one])[0] for one in passes]
        return self._together(passes)

    def _together(self, passes: Sequence[ForwardPass]) -> list[Tensor]:
        steps = [self._decoder.steps(one) for one in passes]
        found: dict[int, Tensor] = {}
        try:
            unit = [next(step) for step in steps][-1]  # the same for all
            passes[0].prefetch(unit)
            while not found:
                weights = self._store.acquire(unit)
                following = unit
                try:
                    for i, step in enumerate(steps):
                        if i:  # the first pass has told what comes next
                            self._after[unit] = following
                        self._prefetch(passes, i, unit)
                        with self._span("compute", f"{passes[i].name}, {unit_label(unit)}"):
                            try:
                                following = step.send(weights)
                            except StopIteration as finished:
                                found[i] = finished.value
                finally:
                    self._store.release(unit)
                self._after[unit] = following
                unit = following
        except BaseException:
            with ExitStack() as all_of_them:
                for one in passes:
                    all_of_them.callback(one.abandon)
            raise
        finally:
            for step in steps:
                step.close()
        return [found[i] for i in range(len(passes))]

    def _prefetch(self, passes: Sequence[ForwardPass], at: int, unit: Unit) -> None:
        """Start to bring what is computed after a pass's turn with a unit."""
        for ahead in range(_AHEAD):
            at += 1
            if at == len(passes):
                at, unit = 0, self._after.get(unit, unit)
            if ahead:
                passes[at].prefetch_cache(unit)
            else:
                passes[at].prefetch(unit)
