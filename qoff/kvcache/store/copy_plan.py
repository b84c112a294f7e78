"""Which blocks of a forward pass are brought where: the same in every layer, so found once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Run:
    """Neighbouring blocks of a tier, and neighbouring places that they are brought to."""

    at: int  # the first place
    local: int  # the first block's number in its tier
    count: int


@dataclass(frozen=True)
class CopyPlan:
    """How `count` blocks come to the places from 0 on."""

    count: int
    from_disk: tuple[Run, ...]
    from_host: tuple[Run, ...]


def runs(pairs: Iterable[tuple[int, int]]) -> tuple[Run, ...]:
    """Pairs of place and number as runs in which both go up one by one."""
    found: list[Run] = []
    for at, local in pairs:
        last = found[-1] if found else Run(-1, -1, 0)
        if last.count and (at, local) == (last.at + last.count, last.local + last.count):
            found[-1] = Run(last.at, last.local, last.count + 1)
        else:
            found.append(Run(at, local, 1))
    return tuple(found)
