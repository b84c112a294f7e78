"""What a needle test has found."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from qoff.errors import ArgumentError
from qoff.kvcache import KVPlacement, KVQuant

from .needle_prompts import NeedleSettings

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
    """All trials of a test, by cache, length, repetition, depth."""

    model: str
    settings: NeedleSettings
    caches: Mapping[str, CacheSetting]
    trials: tuple[Trial, ...]

    @property
    def lengths(self) -> tuple[int, ...]:
        """The lengths, shortest first, each once."""
        return tuple(sorted(set(self.settings.lengths)))

    @property
    def depths(self) -> tuple[float, ...]:
        """The depths, from the beginning of the text on, each once."""
        return tuple(sorted(set(self.settings.depths)))

    def retrieved(self, cache: str) -> list[list[float]]:
        """Parts of the keys that were retrieved, [length][depth]."""
        return self._table(cache, [float(trial.retrieved) for trial in self.trials])

    def log_probabilities(self, cache: str) -> list[list[float]]:
        """Mean log-probabilities of the right key, nats, [length][depth]."""
        return self._table(cache, [trial.log_probability for trial in self.trials])

    def lost_at(self) -> dict[str, int | None]:
        """The shortest length at which less than the threshold is retrieved; None: at none."""
        lost: dict[str, int | None] = {}
        for cache in self.caches:
            rows = zip(self.lengths, self.retrieved(cache), strict=True)
            few = (length for length, row in rows if _mean(row) < self.settings.threshold)
            lost[cache] = next(few, None)
        return lost

    def as_dict(self) -> dict[str, Any]:
        """Settings, tables and all trials, as JSON takes them."""
        return {
            "model": self.model,
            "settings": asdict(self.settings),
            "caches": {name: asdict(cache) for name, cache in self.caches.items()},
            "lengths": self.lengths,
            "depths": self.depths,
            "retrieved": {cache: self.retrieved(cache) for cache in self.caches},
            "log_probability": {cache: self.log_probabilities(cache) for cache in self.caches},
            "lost_at": self.lost_at(),
            "trials": [asdict(trial) for trial in self.trials],
        }

    def markdown(self) -> str:
        """A line for each cache, then a table for each: parts retrieved (log-probability)."""
        lost = self.lost_at()
        lines = [
            "| cache | retrieved | log-probability of the key | lost at |",
            "| --- | --- | --- | --- |",
        ]
        for cache in self.caches:
            found = _mean([_mean(row) for row in self.retrieved(cache)])
            score = _mean([_mean(row) for row in self.log_probabilities(cache)])
            at = "-" if lost[cache] is None else f"{lost[cache]} tokens"
            lines.append(f"| {cache} | {found:.0%} | {score:.2f} | {at} |")
        for cache in self.caches:
            lines += ["", f"{cache}, by tokens and depth:", "", *self._rows(cache)]
        return "\n".join(lines) + "\n"

    def _rows(self, cache: str) -> list[str]:
        lines = [
            "| tokens | " + " | ".join(f"{depth:.0%}" for depth in self.depths) + " |",
            "| --- " * (1 + len(self.depths)) + "|",
        ]
        tables = (self.retrieved(cache), self.log_probabilities(cache))
        for length, found, scores in zip(self.lengths, *tables, strict=True):
            cells = (f"{f:.0%} ({s:.2f})" for f, s in zip(found, scores, strict=True))
            lines.append(f"| {length} | " + " | ".join(cells) + " |")
        return lines

    def _table(self, cache: str, values: Sequence[float]) -> list[list[float]]:
        """Means over repetitions, [length][depth], of a value for each trial."""
        cells: dict[tuple[int, float], list[float]] = {}
        for trial, value in zip(self.trials, values, strict=True):
            if trial.cache == cache:
                cells.setdefault((trial.length, trial.depth), []).append(value)
        return [[_mean(cells[length, depth]) for depth in self.depths] for length in self.lengths]


def is_retrieved(answer: str, key: str) -> bool:
    """Whether the first number of an answer is the key; commas between thousands do not matter."""
    found = _DIGITS.search(answer)
    return found is not None and found[0].replace(",", "") == key


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
