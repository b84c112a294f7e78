"""CacheState: what a cache of experts knows, in memory that jobs can share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .policy import Keys

AGE = 0.05  # the weight of the newest guesses in their accuracy
LEAST_ACCURACY = 0.5  # of late: with less, guesses would take more of the disk than they save
FEW = 16  # experts that are waited for together: another wave takes as long as these compute
NEARLY_ALL = 0.8  # of a layer's experts: who wants so many will want as many of the next layer


class CacheState:
    """Where experts are, what is being read, and what was counted.

    By key, int64: slots, in which an expert is or to which it is on its way; nbytes. By slot:
    keys, int64; hosts, slots in host memory that it is being copied from; whether it is `fixed`,
    and cannot leave; whether its expert was `guessed`; whether it `came`, once it was asked for.
    counts, layer_bytes: of experts of each layer.
    """

    def __init__(self, slots: int, counts: Sequence[int], layer_bytes: Sequence[int]) -> None:
        self.slots: Keys = np.full(sum(counts), -1)
        self.nbytes: Keys = np.repeat(np.array(layer_bytes, dtype=np.int64), counts)
        self.keys: Keys = np.full(slots, -1)
        self.hosts: Keys = np.full(slots, -1)
        self.fixed: NDArray[np.bool_] = np.zeros(slots, dtype=bool)
        self.guessed: NDArray[np.bool_] = np.zeros(slots, dtype=bool)
        self.came: NDArray[np.bool_] = np.zeros(slots, dtype=bool)
        self.free = list(range(slots))
        self.reading: Keys = np.empty(0, dtype=np.int64)  # slots, fixed until their experts came
        self.given_up = -1  # a slot whose read is in the way
        self.waiting: tuple[int, frozenset[int]] = (-1, frozenset())  # layer, and what is left
        self.guesses: Keys = np.empty(0, dtype=np.int64)  # keys of the next layer
        self.unread = False  # there was no room for some of them
        self.doubtful: Keys = np.empty(0, dtype=np.int64)  # guesses that were not there
        self.accuracy = 1.0  # of late, of these
        self.counted = dict.fromkeys(("hits", "misses", "from_host", "bytes"), 0)
        self.counted |= dict.fromkeys(("guesses", "right", "guessed", "wrong"), 0)
