"""Which experts texts take, token by token: as a run recorded them, or made up to be like texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from qoff.errors import ArgumentError, FormatError
from qoff.schema import read_object, shown

_LOCALITY = 0.2  # of texts: the less, the more often they take what they took
_AGAIN = "record them again (qoff bench MODEL --experts -o json)"
Numbers = NDArray[np.int64]


class Routes(Protocol):
    """Texts side by side."""

    def steps(self, texts: int) -> Iterator[Numbers]:
        """The experts of the next token of each text, again and again: [texts, layers, top_k]."""


@dataclass(frozen=True, eq=False)
class RecordedRoutes:
    """Experts of a text's tokens, int64 [tokens, layers, top_k]; layers: those with experts.

    Several texts are this one from places that are equally far apart, and go on at its beginning.
    """

    numbers: Numbers

    @classmethod
    def of(cls, routes: Sequence[tuple[int, Sequence[int]]], tokens: int) -> Self:
        """Of a layer and its experts, token after token, as `ExpertCache.record` has them.

        Raises ArgumentError for routes that are not those of single tokens.
        """
        layers = list(dict.fromkeys(layer for layer, _ in routes))
        order = [layer for layer, _ in routes]
        sizes = {len(numbers) for _, numbers in routes}
        if not routes or order != layers * tokens or len(sizes) != 1 or 0 in sizes:
            raise ArgumentError(f"routes are not those of {tokens} single tokens")
        numbers = np.array([numbers for _, numbers in routes], dtype=np.int64)
        return cls(numbers.reshape(tokens, len(layers), -1))

    @classmethod
    def read(cls, path: Path) -> Self:
        """From a file of `qoff bench --experts -o json`. Raises FormatError for any other."""
        found = read_object(path, _AGAIN)
        routes, tokens = found.get("routes"), found.get("tokens")
        if type(tokens) is not int or not isinstance(routes, list):
            raise FormatError(f"{path}: has no routes and tokens; {_AGAIN}")
        for route in routes:
            if not _is_route(route):
                raise FormatError(f"{path}: {shown(route)} is no layer and its experts; {_AGAIN}")
        try:
            return cls.of(routes, tokens)
        except ArgumentError as error:
            raise FormatError(f"{path}: {error}; {_AGAIN}") from error

    def check(self, layers: int, count: int, top_k: int) -> None:
        """Raise ArgumentError for another model's."""
        _, there, chosen = self.numbers.shape
        most = int(self.numbers.max()) + 1
        if (there, chosen) != (layers, top_k) or most > count:
            raise ArgumentError(
                f"routes of {chosen} of {most} experts or more in {there} layers, and the model "
                f"takes {top_k} of {count} in {layers}: {_AGAIN}"
            )

    def steps(self, texts: int) -> Iterator[Numbers]:
        tokens = len(self.numbers)
        at = np.arange(texts) * tokens // texts
        while True:
            yield self.numbers[at]
            at = (at + 1) % tokens


@dataclass(frozen=True)
class MadeUpRoutes:
    """Texts that take what they took before, the later the likelier, and no experts more often.

    Of a layer's `count` experts, the one that a text took as the r-th last has a weight of
    r ** 0.2 - (r - 1) ** 0.2. Least recently used caches of 64 and of 128 of a layer's 256 experts
    have 67 and 82 % of them so; published are 67 and 81 % (llama.cpp 27861: 54,000 routes of a
    mixture with no experts that all texts prefer).
    """

    layers: int
    count: int
    top_k: int

    def steps(self, texts: int) -> Iterator[Numbers]:
        random = np.random.default_rng(0)
        shape = texts, self.layers, self.count
        numbers = np.arange(self.count, dtype=np.int32)
        last = random.permuted(np.broadcast_to(numbers, shape), axis=-1)
        ranks = np.arange(self.count + 1) / self.count
        seldom = (1 / np.diff(ranks**_LOCALITY)).astype(np.float32)
        while True:  # so many without putting back: those that come first in a race
            when = random.standard_exponential(shape, dtype=np.float32) * seldom
            which = np.argpartition(when, self.top_k - 1, axis=-1)[..., : self.top_k]
            which.sort(axis=-1)
            taken, others = np.take_along_axis(last, which, -1), np.ones(shape, dtype=bool)
            np.put_along_axis(others, which, False, -1)
            last = np.concatenate([taken, last[others].reshape(*shape[:-1], -1)], -1)
            yield np.sort(taken, axis=-1).astype(np.int64)


def _is_route(value: Any) -> bool:
    """A layer, and different experts in their order."""
    if not isinstance(value, list) or len(value) != 2 or not isinstance(value[1], list):
        return False
    numbers = [value[0], *value[1]]
    whole = all(type(number) is int and 0 <= number < 1 << 16 for number in numbers)
    return whole and all(a < b for a, b in pairwise(value[1]))
