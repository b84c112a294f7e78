"""Slots of host memory for experts that left the device: each has one, or none, and is one's."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from qoff.memory.experts.host import HostSlots
from qoff.memory.experts.policy import Lru

EXPERTS, SLOTS = 12, 4


class Slots:
    """Host slots, what lies in them, and what is on its way from there to the device."""

    def __init__(self) -> None:
        self.policy = Lru([5, EXPERTS - 5])
        self.host = HostSlots(SLOTS, self.policy)
        self.content, self.taken = dict[int, int](), dict[int, int]()

    def keep(self, keys: list[int], fails: int = -1) -> None:
        """Let experts leave the device; saving one of them, by its place, fails."""

        def save(place: int, slot: int) -> None:
            assert slot not in self.taken.values()  # it is still read from
            self.content.pop(slot, None)
            if place == fails:
                raise KeyboardInterrupt
            self.content[slot] = keys[place]

        self.host.keep(np.array(keys, dtype=np.int64), save)

    def take(self, keys: list[int]) -> None:
        found = self.host.take(np.array(keys, dtype=np.int64)).tolist()
        for key, slot in zip(keys, found, strict=True):
            if slot >= 0:
                assert self.content[slot] == key
                self.taken[key] = slot

    def put_back(self, keys: list[int]) -> None:
        slots = [self.taken.pop(key, -1) for key in keys]
        self.host.put_back(np.array(keys, dtype=np.int64), np.array(slots))

    def free(self, keys: list[int]) -> None:
        slots = [self.taken.pop(key, -1) for key in keys]
        self.host.free(np.array(slots))
        for slot in slots:
            self.content.pop(slot, None)

    def there(self) -> list[int]:
        """The experts that are here; all else of the slots is free or taken."""
        slots = {key: slot for key in range(EXPERTS) if (slot := int(self.host._slots[key])) >= 0}
        assert all(self.content[slot] == key for key, slot in slots.items())
        every = [*slots.values(), *self.taken.values(), *self.host._free]
        assert sorted(every) == [*range(SLOTS)]
        return [*slots]


def test_a_slot_is_nobody_elses_while_it_is_read_from() -> None:
    """Whatever comes, leaves, comes back or ends early meanwhile."""
    slots, random = Slots(), Random(0)
    for _ in range(2000):
        keys = random.sample(range(EXPERTS), random.randint(1, 5))
        here = slots.there()
        others = [key for key in keys if key not in slots.taken]
        call = random.choice(("use", "keep", "fail", "take", "put back", "free"))
        if call == "use":
            slots.policy.use(0, np.array(keys))
        elif call == "keep":
            slots.keep(others)
        elif call == "fail":
            saved = slots.host.saved
            try:
                slots.keep(others, fails=random.randrange(5))
            except KeyboardInterrupt:
                assert slots.host.saved - saved < len(others)
        elif call == "take":
            slots.take(others)
        elif call == "put back":
            slots.put_back(keys)
            assert {*here} <= {*slots.there()}
        else:
            slots.free(keys)
    assert slots.host.saved > 250


def by_worth() -> Slots:
    """Of experts that are worth more, the higher their number is."""
    slots = Slots()
    for key in range(EXPERTS):
        slots.policy.use(0, np.array([key]))
    return slots


def test_what_is_worth_most_stays() -> None:
    slots = by_worth()
    slots.keep([5, 8, 1, 3, 4])  # of which the last one is worth more than 1
    assert slots.there() == [3, 4, 5, 8]
    slots.keep([0, 9, 2, 11])  # 0 and 2 are worth less than all; 9 and 11 more than 3 and 4
    assert slots.there() == [5, 8, 9, 11]
    assert slots.host.saved == 7
    slots.keep([5, 8])  # they are here
    assert slots.host.saved == 7
    slots.take([9])
    slots.keep([7])  # 9 keeps its slot
    assert slots.there() == [7, 8, 11]
    slots.keep([6, 10])
    assert slots.there() == [8, 10, 11]
    slots.free([9])
    slots.keep([4])
    assert slots.there() == [4, 8, 10, 11]
    slots.take([4])
    slots.put_back([4])
    slots.keep([7])
    assert slots.there() == [7, 8, 10, 11]


def test_where_saving_fails_the_slot_is_free() -> None:
    slots = by_worth()
    slots.keep([0, 1, 2, 3])
    with pytest.raises(KeyboardInterrupt):
        slots.keep([4, 5], fails=1)
    assert slots.there() == [2, 3, 4]
    slots.keep([6, 7])  # the first one in the slot that is free, the other in that of 2
    assert slots.there() == [3, 4, 6, 7]
