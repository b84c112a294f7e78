"""Turn: what a pass, or a round of passes, holds of a weight store on its way through the units."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from typing import Self

from qoff.errors import ArgumentError
from qoff.interrupts import Handler, holdable
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
        self._entered = ExitStack()
        self._signals = Handler()

    def acquire(self, unit: Unit) -> Weights:
        """Give back what is done with and wait for a unit. Raises as `WeightStore.acquire`."""
        self.release(1 if isinstance(unit, ChosenExperts) else 0)
        self._held.append(unit)  # first: an interrupt may come as soon as it is held
        try:
            weights = self._store.acquire(unit)
        except Exception:
            self._held.pop()
            raise
        if self._scratch is not None:
            self._scratch.keep()
        return weights

    def release(self, kept: int = 0) -> None:
        """Give back all units but the first `kept`."""
        if self._scratch is not None and len(self._held) > kept:
            self._scratch.forget()
        while len(self._held) > kept:
            with self._signals:  # a slot that is read into is noted
                self._store.release(self._held.pop())

    def __enter__(self) -> Self:
        self._signals = self._entered.enter_context(holdable())
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._entered:
            if kind is None or issubclass(kind, Exception):
                self.release()
                return
            if self._scratch is not None:
                self._scratch.forget()
            while self._held:  # the last one was not held yet, if it was interrupted there
                unit = self._held.pop()
                with suppress(ArgumentError, KeyError):
                    self._store.release(unit)
