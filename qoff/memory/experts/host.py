"""HostSlots: experts that left the device, in slots of host memory, until they are wanted again.

An expert is on the device or here, never on both, so that the two hold as many different ones as
they have slots. What leaves the device comes in if it is worth more than the least here.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

import numpy as np

from .policy import Keys, Policy


class HostSlots:
    """Which of `count` slots have which experts, by their keys; these leave as `policy` says.

    saved: experts that have come here.
    """

    def __init__(self, count: int, policy: Policy) -> None:
        self._policy, self.count = policy, count
        self._slots: Keys = np.full(policy.first[-1], -1)  # by key
        self._keys: Keys = np.full(count, -1)  # by slot
        self._free = list(range(count))
        self.saved = 0

    def take(self, keys: Keys) -> Keys:
        """The slots of experts, which are theirs no more; -1 for those that are not here.

        They stay as they are until `put_back` or `free`.
        """
        found = self._slots[keys]
        self._keys[found[found >= 0]] = -1
        self._slots[keys] = -1
        return found

    def put_back(self, keys: Keys, slots: Keys) -> None:
        """Have what was taken here again."""
        there = slots >= 0
        self._slots[keys[there]] = slots[there]
        self._keys[slots[there]] = keys[there]

    def free(self, slots: Keys) -> None:
        """Give up slots that were taken, when nothing reads from them any more."""
        self._free += slots[slots >= 0].tolist()

    def keep(self, keys: Keys, save: Callable[[int, int], None]) -> None:
        """Take in experts, one after another, that are worth more than another here or have room.

        save: copies one, by its place in `keys`, to a slot; it is here once that has returned. A
        later one may be worth more than one before, and take its slot.
        """
        heap = self._least(len(keys) - len(self._free))
        worth = self._policy.worth(keys).tolist()
        for place, (key, value) in enumerate(zip(keys.tolist(), worth, strict=True)):
            if self._slots[key] >= 0:
                continue  # it was saved, but could not leave the device
            if self._free:
                slot = self._free.pop()
            elif heap and heap[0][0] < value:
                slot = heappop(heap)[1]
                self._slots[self._keys[slot]] = -1
                self._keys[slot] = -1
            else:
                continue
            try:
                save(place, slot)
            except BaseException:
                self._free.append(slot)
                raise
            heappush(heap, (value, slot))
            self._slots[key], self._keys[slot] = slot, key
            self.saved += 1

    def _least(self, count: int) -> list[tuple[float, int]]:
        """Worth and slot of so many experts that would leave first, ascending: a heap."""
        slots = np.flatnonzero(self._keys >= 0)
        if count <= 0 or not len(slots):
            return []
        keys = self._keys[slots]
        first = self._policy.leaving(keys, min(count, len(slots)))
        worth = self._policy.worth(keys[first])
        return sorted(zip(worth.tolist(), slots[first].tolist(), strict=True))
