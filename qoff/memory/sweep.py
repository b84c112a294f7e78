"""Sweep: a pass over units whose jobs wait for weights themselves, with no Python between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from .plan import Unit
from .slots import SlotRing

if TYPE_CHECKING:
    from qoff.kernels.cpu.jit.recorder import JobReplay
    from qoff.kernels.cpu.jit.slots import Slots


class Sweep:
    """All units in the order of a pass, once or more; what is recorded of it does for all like it.

    stays: weights of the units that no slot has. units: those that come through slots, as often as
    they do; weights: of each, there between `take` and `give_back`; slots: where. `words` are the
    slots'.
    """

    def __init__(
        self,
        stays: Mapping[Unit, Mapping[str, Any]],
        units: Sequence[Unit],
        weights: Sequence[Mapping[str, Any]],
        slots: Sequence[int],
        words: Slots,
        ring: SlotRing,
    ) -> None:
        self._stays, self._units, self._slots = stays, units, slots
        self._words, self._ring = words, ring
        self._taken = 0
        self._held: int | None = None
        self.weights = weights

    def take(self, unit: Unit) -> Mapping[str, Any]:
        """Wait, by a job, for the next unit. Raises what went wrong in reading it."""
        there = self._stays.get(unit)
        if there is not None:
            self._words.wait(None)
            return there
        number, self._taken = self._taken, self._taken + 1
        if self._units[number] != unit:
            raise RuntimeError(f"unit {unit!r} is asked for where {self._units[number]!r} comes")
        self._held = self._slots[number]
        self._words.wait(self._held)
        return self.weights[number]

    def give_back(self) -> None:
        """Give the slot of the unit that was taken back, by a job, if it has one."""
        if self._held is not None:
            self._words.give_back(self._held)
        self._held = None

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
