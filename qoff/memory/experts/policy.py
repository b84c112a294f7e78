"""Which experts leave a full cache first. An expert is a number here, through all layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.int64]
_AGE = 0.05  # how much of an expert's share is that of the newest pass
_GOLDEN = 0.6180339887498949  # whose multiples are spread evenly between whole numbers


class Policy(ABC):
    """An order of leaving. counts: experts of each layer, whose keys follow each other."""

    def __init__(self, counts: Sequence[int]) -> None:
        self.first = np.concatenate([[0], np.cumsum(counts)])
        self.layer = np.repeat(np.arange(len(counts)), counts)
        self._now = 0  # layers computed so far

    def use(self, layer: int, keys: Keys) -> None:
        """The tokens of a pass chose these experts of a layer."""
        self._now += 1
        self._use(layer, keys)

    @abstractmethod
    def worth(self, keys: Keys) -> NDArray[np.float64]:
        """How much it is worth to keep each; those of least worth leave first."""

    def leaving(self, keys: Keys, count: int) -> NDArray[np.intp]:
        """Places in `keys` of the `count` that leave first, the first one first."""
        worth = self.worth(keys)
        if count < len(keys):
            some = np.argpartition(worth, count - 1)[:count]
            return some[np.argsort(worth[some], kind="stable")]
        return np.argsort(worth, kind="stable")

    @abstractmethod
    def _use(self, layer: int, keys: Keys) -> None: ...


class Lru(Policy):
    """Least recently used."""

    def __init__(self, counts: Sequence[int]) -> None:
        super().__init__(counts)
        self._last = np.zeros(self.first[-1])

    def worth(self, keys: Keys) -> NDArray[np.float64]:
        return self._last[keys]

    def _use(self, layer: int, keys: Keys) -> None:
        self._last[keys] = self._now


class Lfu(Policy):
    """Least frequently used of late: by the share of its layer's passes, which ages."""

    def __init__(self, counts: Sequence[int], age: float = _AGE) -> None:
        super().__init__(counts)
        self.age = age
        self.share = np.full(self.first[-1], 1e-3)

    def worth(self, keys: Keys) -> NDArray[np.float64]:
        return self.share[keys]

    def _use(self, layer: int, keys: Keys) -> None:
        self.share[self.first[layer] : self.first[layer + 1]] *= 1 - self.age
        self.share[keys] += self.age


class NextUse(Lfu):
    """Longest expected time to the next use, which no use before its layer's next turn can be.

    An expert of share p is wanted in every 1/p-th pass. What all passes want leaves when its layer
    is done, whose next turn is the furthest: as Belady would have it for layers read in turn. That
    would keep whole layers, and others wait for all of theirs while the links idle meanwhile. So
    three quarters of a turn are a rank that each expert has for good, from 0 to 1 in each layer.

    Where a pass wants half of a layer or more, as prompts do, shares grow when the pass is over:
    else all that it has wanted so far would push out what was wanted often in layers to come.
    """

    def __init__(self, counts: Sequence[int]) -> None:
        super().__init__(counts)
        self._layers = len(counts)
        self.at = 0  # the layer that was used last
        self.ranks = np.concatenate([np.arange(n) * _GOLDEN % 1 for n in counts])
        # Of layers of which this pass wanted many: whether their shares change later, which grow.
        self.late = np.zeros(self._layers, dtype=np.uint8)
        self.grows = np.zeros(self.first[-1], dtype=np.uint8)

    def worth(self, keys: Keys) -> NDArray[np.float64]:
        turns = (self.layer[keys] - self.at - 1) % self._layers / self._layers
        return -((turns + 3 * self.ranks[keys]) / 4 + 1 / self.share[keys])

    def _use(self, layer: int, keys: Keys) -> None:
        if layer <= self.at:
            for late in np.flatnonzero(self.late).tolist():
                of_layer = slice(self.first[late], self.first[late + 1])
                self.share[of_layer] *= 1 - self.age
                self.share[of_layer] += self.age * self.grows[of_layer]
                self.late[late] = self.grows[of_layer] = 0
        if 2 * len(keys) < self.first[layer + 1] - self.first[layer]:
            super()._use(layer, keys)
        else:
            self.late[layer] = self.grows[keys] = 1
        self.at = layer
