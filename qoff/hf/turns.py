"""Calls of `generate` in several threads, which share the memory of one bounded model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from qoff.errors import BudgetError
from qoff.process import Opener

Made = TypeVar("Made")


class OtherCachesError(BudgetError):
    """There would be room, were it not for other caches."""


class Turns:
    """Which calls have room for their caches, and which wait for one of these to end.

    A call waits before it has a cache, and not within another one, so none that has room waits.
    forget: no longer counts what a call made that failed, which its traceback may keep alive. In a
    forked process, where those that run are lost, none waits.
    """

    _within = threading.local()  # `calls`: of this thread, of all models

    def __init__(self, forget: Callable[[object], None]) -> None:
        self._forget = forget
        self._opener = Opener("this model")
        self._changed = threading.Condition()
        self._line: list[object] = []
        self._running: dict[int, object] = {}  # by their threads, with what they made

    @contextmanager
    def call(self) -> Iterator[None]:
        """A call of this thread, from its beginning to its end."""
        outer = self._calls
        self._within.calls = outer + 1
        try:
            yield
        except BaseException:
            if not outer:
                self._forget(self._running.get(threading.get_ident()))
            raise
        finally:
            self._within.calls = outer
            if not outer and self._opener.is_this:
                with self._changed:
                    self._running.pop(threading.get_ident(), None)
                    self._changed.notify_all()

    def when_room(self, make: Callable[[], Made]) -> Made:
        """What `make` returns, as soon as it has room; calls come in their order.

        Raises what it does: OtherCachesError where there is no call to wait for.
        """
        if self._calls != 1 or not self._opener.is_this:
            return make()
        place = object()
        with self._changed:
            self._line.append(place)
            try:
                while (made := self._made(place, make)) is None:
                    self._changed.wait()
                self._running[threading.get_ident()] = made
                return made
            finally:
                self._line.remove(place)
                self._changed.notify_all()

    def running(self) -> list[object]:
        """What the calls that have room made."""
        return list(self._running.values())

    def _made(self, place: object, make: Callable[[], Made]) -> Made | None:
        """What `make` returns, or None where this place in the line has to wait."""
        if self._line[0] is not place:
            return None
        try:
            return make()
        except OtherCachesError:
            if not self._running:
                raise
            return None

    @property
    def _calls(self) -> int:
        return getattr(self._within, "calls", 0)
