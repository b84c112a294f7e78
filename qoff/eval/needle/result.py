"""What a needle test has found."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from qoff.errors import ArgumentError
from qoff.eval.charts import new_figure, save
from qoff.kvcache import KVPlacement, KVQuant
from qoff.measure import tables

from .prompts import NeedleSettings

LOST_BELOW = 0.5  # of the keys of a length
_CELL, _MARGIN = (0.75, 0.6), (1.4, 1.3)  # inches
_DIGITS = re.compile(r"\d+(?:,\d{3})*")


@dataclass(frozen=True)
class CacheSetting:
    """A form of the KV cache. kv: None for float32, on the device alone, else how it is packed.

    placement: where packed blocks lie. Raises ArgumentError for a float32 cache on other tiers.
    """

    kv: KVQuant | None = field(default_factory=KVQuant)
    placement: KVPlacement = field(default_factory=KVPlacement)

    def __post_init__(self) -> None:
        if self.kv is None and self.placement != KVPlacement():
            raise ArgumentError("a float32 cache lies on the device alone; say how it is packed")


@dataclass(frozen=True)
class Trial:
    """One prompt, answered with one cache. log_probability: of the key, in nats."""

    cache: str
    length: int
    depth: float
    repetition: int
    prompt_tokens: int
    key: str
    answer: str
    retrieved: bool
    log_probability: float


@dataclass(frozen=True)
class NeedleResult:
    """All trials of a test, by cache, length, repetition and depth."""

    model: str
    settings: NeedleSettings
    caches: Mapping[str, CacheSetting]
    trials: tuple[Trial, ...]

    def retrieved(self, cache: str) -> list[list[float]]:
        """Fractions of the keys that were retrieved, [length][depth]."""
        return self._means(cache, "retrieved")

    def log_probabilities(self, cache: str) -> list[list[float]]:
        """Mean log-probabilities of the right key, nats, [length][depth]."""
        return self._means(cache, "log_probability")

    def lost_at(self) -> dict[str, int | None]:
        """The shortest length at which fewer than half of the keys are retrieved; None: at none."""
        lost: dict[str, int | None] = {}
        for cache in self.caches:
            rows = zip(self.settings.lengths, self.retrieved(cache), strict=True)
            few = (length for length, row in rows if fmean(row) < LOST_BELOW)
            lost[cache] = next(few, None)
        return lost

    def as_dict(self) -> dict[str, Any]:
        """Settings, tables and all trials, as JSON takes them."""
        return {
            **asdict(self),
            "lengths": self.settings.lengths,
            "depths": self.settings.depths,
            "retrieved": {cache: self.retrieved(cache) for cache in self.caches},
            "log_probability": {cache: self.log_probabilities(cache) for cache in self.caches},
            "lost_at": self.lost_at(),
        }

    def markdown(self) -> str:
        """A line for each cache, then a table for each: fraction retrieved (log-probability)."""
        header = ("cache", "retrieved", "log-probability of the key", "lost at")
        depths = ["tokens", *(f"{depth:.0%}" for depth in self.settings.depths)]
        rows, parts = [], []
        for cache, lost in self.lost_at().items():
            found, scores = self.retrieved(cache), self.log_probabilities(cache)
            means = f"{fmean(map(fmean, found)):.0%}", f"{fmean(map(fmean, scores)):.2f}"
            rows.append((cache, *means, "-" if lost is None else f"{lost} tokens"))
            lines = [
                [str(length), *(f"{f:.0%} ({s:.2f})" for f, s in zip(*both, strict=True))]
                for length, *both in zip(self.settings.lengths, found, scores, strict=True)
            ]
            table = tables.markdown(depths, lines, right=len(depths) - 1)
            parts.append(f"\n{cache}, by tokens and depth:\n\n{table}")
        return "\n".join([tables.markdown(header, rows, right=3), *parts]) + "\n"

    def plot(self, path: Path) -> list[Path]:
        """Heat maps of both tables for each cache, length by depth: `path`.png and .svg.

        Raises QoffError where matplotlib is missing.
        """
        lengths, depths = self.settings.lengths, self.settings.depths
        width = len(self.caches) * (len(depths) * _CELL[0] + _MARGIN[0]) + 1
        figure = new_figure(width, 2 * (len(lengths) * _CELL[1] + _MARGIN[1]))
        axes = figure.subplots(2, len(self.caches), squeeze=False)
        scores = [self.log_probabilities(cache) for cache in self.caches]
        lowest = min(value for table in scores for row in table for value in row)
        for column, cache in enumerate(self.caches):
            self._heat(axes[0][column], self.retrieved(cache), 0.0, 1.0, "{:.0%}")
            self._heat(axes[1][column], scores[column], lowest, 0.0, "{:.1f}")
            axes[0][column].set_title(cache)
        axes[0][0].set_ylabel("tokens (keys retrieved)")
        axes[1][0].set_ylabel("tokens (log-probability)")
        return save(figure, path)

    def _heat(
        self, axes: Any, table: list[list[float]], low: float, high: float, form: str
    ) -> None:
        """One table [length][depth] as colours with numbers."""
        axes.imshow(table, aspect="auto", cmap="RdYlGn", alpha=0.75, vmin=low, vmax=high)
        depths = [f"{depth:.0%}" for depth in self.settings.depths]
        axes.set_xticks(range(len(depths)), depths)
        axes.set_yticks(range(len(table)), [str(length) for length in self.settings.lengths])
        axes.set_xlabel("depth")
        for y, row in enumerate(table):
            for x, value in enumerate(row):
                axes.text(x, y, form.format(value), ha="center", va="center", fontsize="small")

    def _means(self, cache: str, name: str) -> list[list[float]]:
        """Means over repetitions of a field of the trials, [length][depth]."""
        asked = self.settings
        values = [float(getattr(trial, name)) for trial in self.trials if trial.cache == cache]
        shape = len(asked.lengths), asked.repetitions, len(asked.depths)
        means: list[list[float]] = np.reshape(values, shape).mean(axis=1).tolist()
        return means


def is_retrieved(answer: str, key: str) -> bool:
    """Whether the first number of an answer is the key; commas between thousands do not matter."""
    found = _DIGITS.search(answer)
    return found is not None and found[0].replace(",", "") == key
