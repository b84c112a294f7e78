"""How often each policy would have to read, on routes that a run recorded.

`simulate` replays the requests of `ExpertCache.record`, without guesses. `bound` is Belady's: who
knows all that comes lets go of what is wanted latest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from .policy import Keys, Lfu, Lru, NextUse, Policy

Routes = Sequence[tuple[int, Sequence[int]]]  # layer, and the experts that its tokens chose
POLICIES: dict[str, Callable[[Sequence[int]], Policy]] = {
    "LRU": Lru,
    "LFU, aged": Lfu,
    "next use": NextUse,
}


class Belady(Policy):
    """The latest next use leaves first; for requests that are all known."""

    def __init__(self, counts: Sequence[int], routes: Routes) -> None:
        super().__init__(counts)
        self._uses: list[list[int]] = [[] for _ in range(int(self.first[-1]))]
        for at in range(len(routes) - 1, -1, -1):
            layer, numbers = routes[at]
            for number in numbers:
                self._uses[int(self.first[layer]) + number].append(at)
        self._next = np.array([uses[-1] if uses else len(routes) for uses in self._uses])
        self._never = len(routes)

    def worth(self, keys: Keys) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        return -self._next[keys].astype(np.float64)

    def _use(self, layer: int, keys: Keys) -> None:
        for key in keys:
            uses = self._uses[key]
            uses.pop()
            self._next[key] = uses[-1] if uses else self._never


def simulate(policy: Policy, routes: Routes, slots: int, skip: int = 0) -> float:
    """The part of the requested experts that is there, of `slots` slots, after `skip` requests."""
    held = np.zeros(int(policy.first[-1]), dtype=bool)
    hits = wanted = 0
    for at, (layer, numbers) in enumerate(routes):
        keys = policy.first[layer] + np.asarray(numbers, dtype=np.int64)
        policy.use(layer, keys)
        there = held[keys]
        if at >= skip:
            hits, wanted = hits + int(there.sum()), wanted + len(keys)
        missing = keys[~there]
        held[keys[there]] = False  # these stay
        room = slots - int(held.sum()) - int(there.sum())
        others = np.flatnonzero(held)
        leaving = min(max(len(missing) - room, 0), len(others))
        if leaving:
            held[others[policy.leaving(others, leaving)]] = False
        held[keys[there]] = True
        room = slots - int(held.sum())  # where more come, one after another, the last ones stay
        held[missing[max(len(missing) - room, 0) :]] = True
    return hits / max(wanted, 1)


def rates(
    counts: Sequence[int], routes: Routes, slots: Sequence[int], skip: int = 0
) -> dict[str, list[float]]:
    """Hit rates of each policy, and of Belady's bound, by numbers of slots."""
    found = {
        name: [simulate(make(counts), routes, count, skip) for count in slots]
        for name, make in POLICIES.items()
    }
    bound = [simulate(Belady(counts, routes), routes, count, skip) for count in slots]
    return {**found, "Belady": bound}
