"""Which of the units that stream have their source in host memory."""

from __future__ import annotations

from collections.abc import Mapping

from .units import Unit


def spread_evenly(nbytes: Mapping[Unit, int], budget: int) -> frozenset[Unit]:
    """Choose units, given in streaming order with their bytes, that fit `budget` bytes together.

    Up to every unit, the chosen ones hold about the same share of the bytes, so that neither link
    idles while a run of units comes over the other. What is left takes the first units that fit.
    """
    share = min(1.0, budget / max(sum(nbytes.values()), 1))
    chosen: set[Unit] = set()
    held, due = 0, 0.0
    for unit, size in nbytes.items():
        due += size * share
        if held + size / 2 <= due and held + size <= budget:
            chosen.add(unit)
            held += size
    for unit, size in nbytes.items():
        if unit not in chosen and held + size <= budget:
            chosen.add(unit)
            held += size
    return frozenset(chosen)
