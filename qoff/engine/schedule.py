"""The block schedule: layers outer, batches inner."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from itertools import groupby

from torch import Tensor

from qoff.kernels.layout.distribution import Choice
from qoff.kernels.ops import Scratch
from qoff.kvcache.slots import SlotSubset
from qoff.memory import ChosenExperts, Unit, WeightStore
from qoff.memory.instrumentation import PLAIN, Instrumentation
from qoff.memory.plan import unit_label
from qoff.memory.turn import Turn
from qoff.models.forward_pass import ForwardPass, RoundMixture
from qoff.models.native.following import Noise
from qoff.models.native.linear import Steps
from qoff.models.runtime import AnyDecoder, followed, followed_tokens, joined, swept

_AHEAD = 2  # turns whose KV cache is brought meanwhile


class Schedule:
    """Runs rounds: each pass once through the model.

    In the block schedule (FlexGen's zig-zag) all passes use a unit's weights before the next unit
    comes; in the sequential one each pass goes through all units alone. While one pass is computed,
    weights of the next unit and KV cache and hidden states of the next pass are on their way.
    Experts of a mixture are asked for by all passes together, and each comes once. scratch: where
    ops dequantize weights, which keeps those of a unit from pass to pass.
    """

    def __init__(
        self,
        decoder: AnyDecoder,
        store: WeightStore,
        schedule: str,
        instrumentation: Instrumentation = PLAIN,
        scratch: Scratch | None = None,
    ) -> None:
        self._decoder = decoder
        self._store, self._scratch = store, scratch
        self.kind = schedule  # may change between two rounds
        self._span = instrumentation.span
        self._follows = instrumentation.timeline is None
        self._after: dict[Unit, Unit] = {}  # which unit a pass asks for after each

    def round(self, passes: Sequence[ForwardPass]) -> list[Tensor]:
        """Return the logits of each pass, float32 [R, vocab_size]."""
        if len(passes) == 1 and self._follows:
            logits = followed(self._decoder, self._store, passes[0])
            if logits is not None:
                return [logits]
        together = self.kind != "sequential"
        try:
            found = swept(self._decoder, self._store, passes, together)
            if found is not None:
                return found
            if together:
                return self._joined(passes)
            return [self._together([one])[0] for one in passes]
        except BaseException:
            with ExitStack() as all_of_them:
                for one in passes:
                    all_of_them.callback(one.abandon)
            raise

    def steps(
        self, run: ForwardPass, choice: Choice, most: int, noise: Noise | None
    ) -> list[list[int]]:
        """Several decode steps of the only pass; see `Following.tokens`. None where it cannot."""
        if not self._follows:
            return []
        return followed_tokens(self._decoder, self._store, run, choice, most, noise)

    def _joined(self, passes: Sequence[ForwardPass]) -> list[Tensor]:
        """As `_together`, those of a batch as one pass where that can be."""
        ones = list[ForwardPass]()
        for _, batch in groupby(passes, _cache):
            runs = list(batch)
            one = joined(self._decoder, runs)
            ones += runs if one is None else [one]
        found = zip(ones, self._together(ones), strict=True)
        return [each for one, logits in found for each in one.parted(logits)]

    def _together(self, passes: Sequence[ForwardPass]) -> list[Tensor]:
        mixture = RoundMixture(passes=len(passes))
        for one in passes:
            one.mixture = mixture
        steps = [self._decoder.steps(one) for one in passes]
        found: dict[int, Tensor] = {}
        try:
            unit = [next(step) for step in steps][-1]  # the same for all, but for experts
            passes[0].prefetch(unit)
            with Turn(self._store, self._scratch if len(passes) > 1 else None) as turn:
                while not found:
                    weights = turn.acquire(unit)
                    following: list[Unit] = []
                    for i, step in enumerate(steps):
                        if following:  # the first pass has told what comes next
                            self._after[unit] = following[-1]
                        self._prefetch(passes, i, unit)
                        with self._span("compute", f"{passes[i].name}, {unit_label(unit)}"):
                            try:
                                following.append(step.send(weights))
                            except StopIteration as finished:
                                found[i] = finished.value
                    if any(isinstance(one, ChosenExperts) for one in following):
                        following = self._experts(turn, passes, steps, following)
                        passes[0].prefetch(following[-1])
                    self._after[unit] = unit = following[-1] if following else unit
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

    def _experts(
        self, turn: Turn, passes: Sequence[ForwardPass], steps: list[Steps], units: list[Unit]
    ) -> list[Unit]:
        """Send the passes the experts that they ask for; return the units they ask for then."""
        while True:
            asking = {i: u for i, u in enumerate(units) if isinstance(u, ChosenExperts)}
            if not asking:
                return units
            together = _together(list(asking.values()))
            weights = turn.acquire(together)
            order = list(asking)
            passes[order[0]].prefetch(together)
            for i, following in zip(order, [*order[1:], None], strict=True):
                if following is not None:
                    passes[following].prefetch(together)
                with self._span("compute", f"{passes[i].name}, {unit_label(together)}"):
                    units[i] = steps[i].send(weights)


def _cache(run: ForwardPass) -> object:
    """Of the batch that a pass is of."""
    return run.cache.cache if isinstance(run.cache, SlotSubset) else run.cache


def _together(asked: Sequence[ChosenExperts]) -> ChosenExperts:
    """What all of them ask for."""
    numbers = sorted(set().union(*(one.numbers for one in asked)))
    guesses = dict.fromkeys(expert for one in asked for expert in one.guesses)
    return ChosenExperts(asked[0].layer, tuple(numbers), tuple(guesses))
