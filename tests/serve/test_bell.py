"""Events that other threads set wake an event loop once."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from qoff.serve.bell import Bell


def test_events_of_a_round_wake_the_loop_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ring() -> int:
        loop, woken = asyncio.get_running_loop(), 0
        wake, bell = loop.call_soon_threadsafe, Bell(loop)

        def counted(*call: object) -> object:
            nonlocal woken
            woken += 1
            return wake(*call)

        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
        for round_ in range(3):
            events = [asyncio.Event() for _ in range(5)]
            with ThreadPoolExecutor(1) as thread:  # the loop does not run before it has ended
                list(thread.map(bell.ring, events))
            await asyncio.gather(*(one.wait() for one in events))
            assert woken == round_ + 1
        return woken

    assert asyncio.run(ring()) == 3


def test_a_closed_loop_is_left_alone() -> None:
    loop = asyncio.new_event_loop()
    bell, event = Bell(loop), asyncio.Event()
    loop.close()
    for _ in range(2):
        bell.ring(event)
    assert not event.is_set()
