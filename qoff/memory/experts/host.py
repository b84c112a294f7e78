"""HostSlots: experts that left the device, in slots of host memory, until they are wanted again.

An expert is on the device or here, never on both, so that the two hold as many different ones as
they have slots. What leaves the device comes in if it is worth more than the least here.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from qoff.memory.io.transfers import Transfers

from .policy import Policy


class HostSlots:
    """Experts by their keys in `memory`, uint8 [slots, bytes], which leave as `policy` says.

    saved: experts that have been copied here.
    """

    def __init__(self, memory: Tensor, policy: Policy, transfers: Transfers) -> None:
        self._memory, self._policy, self._transfers = memory, policy, transfers
        self._slots: dict[int, int] = {}  # by key
        self._free = list(range(len(memory)))
        self.saved = 0

    def take(self, key: int) -> int | None:
        """The slot of an expert that is here, which is its no more; None for others.

        It stays as it is until `put_back` or `free`.
        """
        return self._slots.pop(key, None)

    def memory(self, slot: int) -> Tensor:
        """The bytes of a slot."""
        return self._memory[slot]

    def put_back(self, key: int, slot: int) -> None:
        """Have what was taken here again."""
        self._slots[key] = slot

    def free(self, slot: int) -> None:
        """Give up a slot that was taken, when nothing reads from it any more."""
        self._free.append(slot)

    def keep(self, key: int, memory: Tensor) -> None:
        """Copy an expert from the device, if it is worth more than another here or has room."""
        if not self._free:
            keys = np.array(list(self._slots), dtype=np.int64)
            if not len(keys):
                return
            least = int(keys[self._policy.leaving(keys, 1)[0]])
            worth = self._policy.worth(np.array([least, key]))
            if worth[0] >= worth[1]:
                return
            self._free.append(self._slots.pop(least))
        slot = self._free.pop()
        self._transfers.save(memory, self._memory[slot][: len(memory)])
        self._slots[key] = slot
        self.saved += 1
