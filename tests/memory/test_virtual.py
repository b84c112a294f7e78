"""Virtual time: calls run as threads would run them, and only waiting takes time."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from qoff.errors import DiskReadError
from qoff.memory.io.virtual import VirtualClock


def test_workers_take_calls_in_order_so_many_at_a_time() -> None:
    clock, ended = VirtualClock(), list[tuple[str, float]]()
    workers = clock.workers(2, "two")

    def call(name: str, seconds: float) -> str:
        clock.sleep_until(clock.now() + seconds)
        ended.append((name, clock.now()))
        return name

    first = [workers.submit(lambda n=n, s=s: call(n, s)) for n, s in (("a", 3), ("b", 1))]
    later = workers.submit(lambda: call("c", 1))
    last = workers.submit(lambda: call("d", 1), after=[later])
    urgent = workers.submit(lambda: call("e", 0.5), urgent=True)
    assert clock.result(last) == "d"
    clock.wait([*first, urgent])
    assert ended == [("b", 1.0), ("e", 1.5), ("c", 2.5), ("a", 3.0), ("d", 3.5)]


def test_a_call_may_wait_for_calls_of_others() -> None:
    clock = VirtualClock()
    inner, outer = clock.workers(1, "inner"), clock.workers(1, "outer")

    def call() -> float:
        clock.result(inner.submit(lambda: clock.sleep_until(2.0)))
        return clock.now()

    assert clock.result(outer.submit(call)) == 2.0


def test_what_fails_is_raised_where_it_is_waited_for() -> None:
    clock = VirtualClock()
    workers = clock.workers(1, "one")
    with pytest.raises(ZeroDivisionError):
        clock.result(workers.submit(lambda: 1 // 0))
    running, queued = workers.submit(lambda: clock.sleep_until(5.0)), workers.submit(lambda: None)
    clock.sleep_until(1.0)
    workers.close()
    assert running.done()
    assert clock.now() == 5.0
    with pytest.raises(DiskReadError, match="closed"):
        queued.result()
    with pytest.raises(DiskReadError, match="closed"):
        clock.result(workers.submit(lambda: None))


def test_nobody_waits_for_what_cannot_end() -> None:
    with pytest.raises(RuntimeError, match="nothing is under way"):
        VirtualClock().result(Future[None]())
