"""The rank-sum test of Wilcoxon, Mann and Whitney: do two samples come from one distribution?

Only the order of the values counts, so a value far out counts no more than one just beyond the
others, and nothing is assumed of the distribution. Exact for any number of values, with ties.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def p_value(a: Sequence[float], b: Sequence[float]) -> float:
    """How likely ranks at least as unequal are, in either direction, if a and b are of one kind.

    Each way to deal all values into two samples of these sizes is as likely as any other; p is
    twice the part of them whose sum of ranks is as far out as this one, on the same side, at most
    1. Both samples have at least one value.
    """
    ranks = _double_ranks([*a, *b])
    counts = _sums(ranks, len(a))
    found = sum(ranks[: len(a)])
    total = math.comb(len(ranks), len(a))
    below, above = counts[: found + 1].sum(), counts[found:].sum()
    return min(1.0, 2 * float(min(below, above)) / total)


def least_p(a: int, b: int) -> float:
    """The least p that samples of so many values can have: all of one before all of the other."""
    return min(1.0, 2 / math.comb(a + b, a))


def _double_ranks(values: Sequence[float]) -> list[int]:
    """Twice the rank of each value, from 1 up; equal values have the mean of their ranks."""
    ordered = np.sort(np.asarray(values))
    first = np.searchsorted(ordered, values, "left")
    behind = np.searchsorted(ordered, values, "right")
    return [int(low + high + 1) for low, high in zip(first, behind, strict=True)]


def _sums(ranks: Sequence[int], size: int) -> NDArray[np.float64]:
    """How many of the subsets of `size` ranks have the sum 0, 1, ..., as counts by the sum."""
    largest = sum(sorted(ranks)[-size:])
    counts = np.zeros((size + 1, largest + 1))
    counts[0, 0] = 1
    for rank in ranks:
        counts[1:, rank:] += counts[:-1, : largest + 1 - rank].copy()
    return counts[size]
