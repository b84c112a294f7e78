"""How the thread that computes wakes an event loop: once a round, not once an answer."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress


class Bell:
    """Sets events of one event loop from other threads.

    To wake a loop is a system call, at which a thread also gives up Python's lock. Events that are
    to be set before the loop has woken are set then, too.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._events = deque[asyncio.Event]()
        self._rung = False  # and not heard yet

    def ring(self, event: asyncio.Event) -> None:
        """Set an event soon; for any thread. Where the loop is closed, nobody waits."""
        self._events.append(event)
        if not self._rung:
            self._rung = True
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._heard)

    def _heard(self) -> None:
        self._rung = False  # whoever comes from here on rings again
        while self._events:
            self._events.popleft().set()
