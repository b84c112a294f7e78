"""Which tokens the jobs of `pack_job` are about, as they read it from memory."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from qoff.kernels.cpu.operands import fail
from qoff.kernels.layout.heads import KEYS_PER_VECTOR
from qoff.kernels.layout.kv_format import BLOCK_TOKENS

_OP = "pack_blocks"
ORIGIN_FIELDS = ("slot", "place of the first token", "opens a sequence", "number of the block")
MOVE_FIELDS = ("slot", "place of the first token", "tokens", "slot to", "place to")


class _Places:
    """Runs of tokens in slots: checked once, and against the memory of each layer by their bounds.

    slots, first, count: int64 [n], a run's slot, the place of its first token, a multiple of 16,
    and its tokens. Raises OpError.
    """

    def __init__(
        self, slots: NDArray[np.int64], first: NDArray[np.int64], count: NDArray[np.int64] | int
    ) -> None:
        self._slots = self._stop = 0
        if len(slots):
            self._slots, self._stop = int(slots.max()) + 1, int((first + count).max())
            if int(slots.min()) < 0 or int(first.min()) < 0 or (first % KEYS_PER_VECTOR).any():
                fail(_OP, f"tokens begin at multiples of {KEYS_PER_VECTOR} in slots from 0 on")

    def check(self, values: Tensor) -> None:
        """Raise OpError where V, [slots, kv_heads, capacity, D], has no such places."""
        slots, _, capacity, _ = values.shape
        if self._slots > slots:
            fail(_OP, f"slots up to {self._slots - 1} of {slots}")
        if self._stop > capacity:
            fail(_OP, f"tokens end at {capacity} at most, not at {self._stop}")


class Origins:
    """Blocks to be packed, int64 [n, ORIGIN_FIELDS]: the same for all layers that are alike.

    numbers: of blocks in the memory of records. Raises OpError for slots, places and numbers that
    there cannot be.
    """

    def __init__(self, rows: NDArray[np.int64]) -> None:
        if rows.dtype != np.int64 or rows.shape[1:] != (len(ORIGIN_FIELDS),):
            fail(_OP, f"origins are int64 [n, {len(ORIGIN_FIELDS)}], not {list(rows.shape)}")
        self.rows = np.ascontiguousarray(rows)
        self.places = _Places(rows[:, 0], rows[:, 1], BLOCK_TOKENS)
        self.blocks = int(rows[:, 3].max()) + 1 if len(rows) else 0  # that the memory has, at least
        if len(rows) and int(rows[:, 3].min()) < 0:
            fail(_OP, f"there is no block {int(rows[:, 3].min())}")


class Moves:
    """Tokens to be copied from some places to others, int64 [n, MOVE_FIELDS]; see `Origins`."""

    def __init__(self, rows: NDArray[np.int64]) -> None:
        if rows.dtype != np.int64 or rows.shape[1:] != (len(MOVE_FIELDS),):
            fail(_OP, f"moves are int64 [n, {len(MOVE_FIELDS)}], not {list(rows.shape)}")
        self.rows = np.ascontiguousarray(rows)
        slot, place, tokens, to_slot, to_place = rows.T
        self.source, self.target = _Places(slot, place, tokens), _Places(to_slot, to_place, tokens)

    def __len__(self) -> int:
        return len(self.rows)
