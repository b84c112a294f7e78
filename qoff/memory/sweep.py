"""Sweep: a pass over units whose jobs wait for weights themselves, with no Python between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from .slots import SlotRing

if TYPE_CHECKING:
    from qoff.kernels.cpu.jit.recorder import JobReplay
    from qoff.kernels.cpu.jit.slots import Slots


class Sweep:
    """One use of each unit, in order; what is recorded of it does for every sweep like it.

    weights: of each unit, there between `take` and `give_back` of its number. slots: where each is,
    None where it stays in memory; `words` are theirs.
    """

    def __init__(
        self,
        weights: list[Mapping[str, Any]],
        slots: Sequence[int | None],
        words: Slots,
        ring: SlotRing,
    ) -> None:
        self.weights = weights
        self._slots, self._words, self._ring = slots, words, ring

    def take(self, number: int) -> None:
        """Wait, by a job, for a unit. Raises what went wrong in reading it."""
        self._words.wait(self._slots[number])

    def give_back(self, number: int) -> None:
        """Give a unit's slot back, by a job."""
        slot = self._slots[number]
        if slot is not None:
            self._words.give_back(slot)

    def run(self, replay: JobReplay, *others: Slots) -> bool:
        """Do all of it as it was recorded; False, and nothing is done, where that is stale.

        others: what its jobs wait for beside. Raises what went wrong in reading.
        """
        from qoff.kernels.cpu.jit.slots import run_waiting  # compiled when it is imported

        return run_waiting(replay, [self._words, *others])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self._ring.swept(done=error is None)
