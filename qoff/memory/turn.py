"""Turn: what a pass, or a round of passes, holds of a weight store on its way through the units."""

from __future__ import annotations

from typing import Self

from qoff.kernels.ops import Scratch

from .plan import ChosenExperts, Unit
from .store import Weights, WeightStore


class Turn:
    """Each unit is held until the next one is asked for; a layer as long as its experts come.

    scratch: keeps what is made of weights while they are held; None where nothing does.
    """

    def __init__(self, store: WeightStore, scratch: Scratch | None = None) -> None:
        self._store, self._scratch = store, scratch
        self._held: list[Unit] = []

    def acquire(self, unit: Unit) -> Weights:
        """Give back what is done with and wait for a unit. Raises as `WeightStore.acquire`."""
        self.release(1 if isinstance(unit, ChosenExperts) else 0)
        weights = self._store.acquire(unit)
        self._held.append(unit)
        if self._scratch is not None:
            self._scratch.keep()
        return weights

    def release(self, kept: int = 0) -> None:
        """Give back all units but the first `kept`."""
        if self._scratch is not None and len(self._held) > kept:
            self._scratch.forget()
        while len(self._held) > kept:
            self._store.release(self._held.pop())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
