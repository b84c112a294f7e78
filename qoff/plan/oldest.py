"""Which of a sequence's KV blocks are far: the oldest of those that it will have."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .mixture import Array


class Oldest(NamedTuple):
    """Blocks of a sequence, from `first` to `last` while it is decoded, and `most` in the end."""

    first: float
    last: float
    most: float

    def beyond(self, parts: Array) -> Array:
        """Of the blocks that are still to come, the part that will be among these first parts."""
        there = (self.first + self.last) / 2
        return np.maximum(0.0, parts * self.most - there) / max(1e-9, self.most - there)

    def of(self, parts: Array) -> Array:
        """Of the blocks that are attended to, the part in these first parts of all, on average.

        It is no less: a sequence that has half of its blocks has all of its oldest half.
        """
        first, last = self.first, self.last
        far = parts * self.most
        if last <= first:
            return np.minimum(1.0, far / first) if first else parts
        turn = np.clip(far, first, last)  # from so many on, newer ones are near
        area = (turn**2 - first**2) / 2 + turn * (last - turn)
        there = np.minimum(far, area / (last - first))
        found: Array = np.maximum(parts, there / ((first + last) / 2))
        return found
