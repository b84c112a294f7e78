"""What rounds move of a mixture of experts: those that tokens choose and a cache has not."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, islice

import numpy as np
import numpy.typing as npt

from qoff.memory.experts.policy import NextUse
from qoff.memory.experts.routes import MadeUpRoutes, RecordedRoutes, Routes
from qoff.memory.experts.simulator import simulate
from qoff.models.spec_parts import ExpertsSpec

from .processor import Processor

Array = npt.NDArray[np.float64]
HELD = np.array([0, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 1])  # parts of the experts, in a cache
_TOGETHER = (1, 8, 64)  # tokens that ask together, of different texts
LAYERS = 8  # whose routes are replayed, with caches as much smaller
_ROUNDS, _LEAST = 128, 12  # that are replayed of one token, and of many


@dataclass(frozen=True)
class Moves:
    """What a round moves of the weights, as a part of all, where a part p of them is away.

    values: at the parts `away`, ascending from 0 to 1, [plans, parts], and linear between. No less
    than the largest of slopes * p + offsets, [plans, lines], which is convex.
    """

    away: Array
    values: Array
    slopes: Array
    offsets: Array
    share: float = 1.0  # of the weights that experts are

    @classmethod
    def all_of(cls, plans: int) -> Moves:
        """Of a model whose tokens need all weights."""
        ends = np.array([0.0, 1.0])
        return cls(ends, np.tile(ends, (plans, 1)), np.ones((plans, 1)), np.zeros((plans, 1)))

    def beside(self, part: Array, computed: Array) -> Array:
        """The same, where experts that are a part `computed` of all weights are not among them.

        They take their share of what tokens want, and the cache is for the others.
        """
        others = np.maximum(1e-9, 1 - computed / self.share)
        experts = np.minimum(part, self.share * others)
        found: Array = others * self.of(experts / others) + part - experts
        return found

    def of(self, part: Array) -> Array:
        """Of these parts, [plans]."""
        last = np.clip(np.searchsorted(self.away, part), 1, len(self.away) - 1)
        rows, first = np.arange(len(self.values)), last - 1
        rest = (part - self.away[first]) / (self.away[last] - self.away[first])
        found: Array = self.values[rows, first] * (1 - rest) + self.values[rows, last] * rest
        return found

    @property
    def least(self) -> Array:
        """At least so many times p, [plans]."""
        found: Array = self.slopes.min(-1)
        return found


@dataclass(frozen=True)
class Mixture:
    """The experts of a model, and what texts take of them.

    share: of the bytes of all weights. routes: those that a run recorded; None: `MadeUpRoutes`.
    Raises ArgumentError for routes of another model.
    """

    experts: ExpertsSpec
    share: float
    routes: RecordedRoutes | None = None

    def __post_init__(self) -> None:
        if self.routes is not None:
            experts = self.experts
            self.routes.check(sum(experts.layers), experts.count, experts.top_k)

    @property
    def total(self) -> int:
        """Experts of all layers."""
        return self.experts.count * sum(self.experts.layers)

    @property
    def of_layers(self) -> tuple[float, float]:
        """The parts of the experts that layers but the last have, and that the last one has."""
        layers = self.experts.layers
        return sum(layers[:-1]) / sum(layers), layers[-1] / sum(layers)

    @property
    def _replayed(self) -> tuple[Array, Array]:
        experts, layers = self.experts, min(LAYERS, sum(self.experts.layers))
        made_up = MadeUpRoutes(layers, experts.count, experts.top_k)
        return _replay(self.routes or made_up, experts.count, sum(experts.layers))

    def wanted(self, tokens: Array) -> Array:
        """The part of a layer's experts that so many tokens of different texts choose."""
        left = np.log(np.maximum(1e-9, 1 - self._replayed[0]))  # as linear as if by chance
        beyond = np.maximum(1.0, tokens / _TOGETHER[-1])
        found: Array = 1 - np.exp(beyond * np.interp(tokens, _TOGETHER, left))
        return found

    def hits(self, held: Array, tokens: Array) -> Array:
        """The part of what tokens want that a cache of a part `held` of all experts has.

        held: [H]; tokens: [T]. Returns [T, H].
        """
        rows = np.interp(np.log(tokens), np.log(_TOGETHER), np.arange(len(_TOGETHER)))[:, None]
        columns = np.interp(held, HELD, np.arange(len(HELD)))

        def shares(at: Array, count: int) -> Array:  # [..., count]: of the two next to each
            found: Array = np.maximum(0.0, 1 - np.abs(at[..., None] - np.arange(count)))
            return found

        by_rows, by_columns = shares(rows[:, 0], len(_TOGETHER)), shares(columns, len(HELD))
        found = by_rows @ self._replayed[1] @ by_columns.T
        # An expert that is held saves no more than one read.
        bounded: Array = np.minimum(found, held / np.maximum(self.wanted(tokens)[:, None], held))
        return bounded

    def seconds(
        self,
        processor: Processor,
        columns: float,
        bits: int,
        rows: tuple[Array, Array],
        times: Array,
        activation_bits: int = 16,
        of: tuple[Array | float, Array | float] = (1.0, 1.0),
    ) -> Array:
        """Seconds of a round's experts: each that is chosen computes for its own rows.

        columns: numbers of all experts. rows: of a round, and of its last layer. times: that an
        expert computes, for as many of them at once. of: the part of the experts that is meant, of
        the layers but the last, and of that.
        """
        top_k = self.experts.top_k
        found = np.zeros_like(times)
        for m, layers, part in zip(rows, self.of_layers, of, strict=True):
            together = m / times
            chosen = self.wanted(together) * self.experts.count
            weights = columns * layers * part * chosen
            own = np.maximum(1.0, together * top_k / chosen)
            found = found + times * weights * processor.experts_s(bits, own, activation_bits)
        return found

    def moves(self, tokens: Array, of_last: Array) -> Moves:
        """Of rounds, or passes, in which so many tokens ask together, [plans].

        of_last: that ask the last layer, if it has experts. All other weights are nearer than the
        experts.
        """
        away, layers = self.share * (1 - HELD[::-1]), self.experts.layers
        last = layers[-1] / sum(layers)
        values = (1 - last) * self._missed(tokens) + last * self._missed(of_last)
        if self.share < 1:
            away = np.append(away, 1.0)
            values = np.hstack([values, values[:, -1:] + 1 - self.share])
        convex = _convex(away, values)
        slopes = np.diff(convex) / np.diff(away)
        offsets = np.minimum(0.0, convex[:, :-1] - slopes * away[:-1])  # nothing away, none moved
        return Moves(away, values, slopes, offsets, self.share)

    def _missed(self, tokens: Array) -> Array:
        """Of all weights the part that a cache of each size in `HELD`, largest first, has not."""
        wanted = self.share * self.wanted(tokens)[:, None]
        found: Array = wanted * (1 - self.hits(HELD[::-1], tokens))
        return found


def _convex(x: Array, values: Array) -> Array:
    """The largest convex curves below some, at x, ascending: [..., x]."""
    found = values.copy()
    for first, last in combinations(range(len(x)), 2):
        part = (x[first + 1 : last] - x[first]) / (x[last] - x[first])
        line = values[..., [first]] * (1 - part) + values[..., [last]] * part
        inner = found[..., first + 1 : last]
        np.minimum(inner, line, out=inner)
    return found


@lru_cache(8)
def _replay(routes: Routes, count: int, layers: int) -> tuple[Array, Array]:
    """The part of `count` experts that tokens want together, and that of these which caches have.

    By `_TOGETHER`; by that and `HELD`. Of some of the layers.
    """
    there = next(routes.steps(1)).shape[1]
    some = np.unique(np.linspace(0, there - 1, LAYERS).round().astype(int))
    wanted, hits = list[float](), list[list[float]]()
    for together in _TOGETHER:
        asked = [
            (layer, np.unique(step[:, number]).tolist())
            for step in islice(routes.steps(together), max(_ROUNDS // together, _LEAST))
            for layer, number in enumerate(some)
        ]
        each = sum(len(numbers) for _, numbers in asked) / len(asked)
        of_all = HELD[1:-1] * count * layers
        slots = slots_of_some(of_all, each, len(some), layers).round().astype(int)
        counts = [count] * len(some)
        found = [simulate(NextUse(counts), asked, n, len(asked) // 2) for n in slots]
        wanted.append(each / count)
        hits.append([0.0, *found, 1.0])
    return np.array(wanted), np.array(hits)


def slots_of_some(slots: Array, asked: float, some: int, layers: int) -> Array:
    """Slots for the experts of some of the layers, which hit as often as `slots` do for all.

    asked: experts of a layer that are asked for together. They cannot leave, so a layer has its
    share of the slots or these, if they are more, and the others share the rest.
    """
    own = np.clip(asked, slots / layers, slots)
    found: Array = own + (slots - own) * (some - 1) / max(1, layers - 1)
    return found
