"""One option for each of many items: the least cost within a size, or the least size for a cost.

Steps along the lower convex hull of each item's options (size against cost) are taken in the order
of what they gain per byte. Where items are many and each is a small part of the whole, as matrices
of a model are, what this leaves to the optimum is less than one step of one item.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Option:
    """One way to have an item: its size in bytes, and what it costs in any other unit."""

    nbytes: int
    cost: float


@dataclass(frozen=True)
class _Step:
    """Going from one option of an item to a larger and cheaper one."""

    item: int
    before: int
    after: int
    nbytes: int  # more
    gain: float  # less cost

    @property
    def rate(self) -> float:
        return self.gain / self.nbytes


def least_cost(items: Sequence[Sequence[Option]], nbytes: int) -> list[int] | None:
    """Return the number of each item's option, so that their sizes together are at most `nbytes`.

    None where the smallest options are larger. A step that does not fit is passed over, and so are
    later ones of its item. The cost is above the least possible one by less than what the first
    step that did not fit would have gained.
    """
    chosen = [_smallest(item) for item in items]
    left = nbytes - sum(item[i].nbytes for item, i in zip(items, chosen, strict=True))
    if left < 0:
        return None
    closed: set[int] = set()
    for step in _steps(items):
        if step.item in closed or step.nbytes > left:
            closed.add(step.item)
            continue
        chosen[step.item] = step.after
        left -= step.nbytes
    return chosen


def least_size(items: Sequence[Sequence[Option]], cost: float) -> list[int] | None:
    """Return the number of each item's option, so that their costs together are at most `cost`.

    None where no choice is so cheap. Steps are taken until that is so; then those that were not
    needed after all are taken back, the largest first. The size is above the least possible one by
    less than that of the last step.
    """
    chosen = [_smallest(item) for item in items]
    spare = cost - sum(item[i].cost for item, i in zip(items, chosen, strict=True))
    taken: dict[int, _Step] = {}  # the newest of each item
    for step in _steps(items):
        if spare >= 0:
            break
        chosen[step.item] = step.after
        spare += step.gain
        taken[step.item] = step
    if spare < 0:
        return None
    for step in sorted(taken.values(), key=lambda s: -s.nbytes):
        if step.gain <= spare:
            chosen[step.item] = step.before
            spare -= step.gain
    return chosen


def _smallest(item: Sequence[Option]) -> int:
    """The smallest option of an item, of several the cheapest."""
    return min(range(len(item)), key=lambda i: (item[i].nbytes, item[i].cost))


def _steps(items: Sequence[Sequence[Option]]) -> list[_Step]:
    """Steps of all items, those that gain most per byte first; those of an item in their order."""
    found = [step for i, item in enumerate(items) for step in _hull(i, item)]
    return sorted(found, key=lambda step: -step.rate)


def _hull(number: int, item: Sequence[Option]) -> list[_Step]:
    """The steps between the corners of the lower convex hull, their rates descending."""

    def step(a: int, b: int) -> _Step:
        nbytes, gain = item[b].nbytes - item[a].nbytes, item[a].cost - item[b].cost
        return _Step(number, a, b, nbytes, gain)

    order = sorted(range(len(item)), key=lambda i: (item[i].nbytes, item[i].cost))
    hull = order[:1]
    for i in order[1:]:
        if item[i].cost >= item[hull[-1]].cost:
            continue
        while len(hull) > 1 and step(hull[-2], hull[-1]).rate <= step(hull[-1], i).rate:
            hull.pop()
        hull.append(i)
    return [step(a, b) for a, b in pairwise(hull)]
