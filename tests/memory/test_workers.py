from __future__ import annotations

import threading

import pytest

from qoff.errors import DiskReadError, DiskWriteError, QoffError
from qoff.memory.io.workers import Workers
from qoff.system_memory import refusals

TIMEOUT_S = 20


def end(how: BaseException) -> None:
    raise how


@pytest.mark.parametrize("death", [SystemExit(3), KeyboardInterrupt()])
@pytest.mark.parametrize("error", [DiskReadError, DiskWriteError])
def test_death_fails_the_call_at_hand_the_queued_and_the_later(
    death: BaseException, error: type[DiskReadError | DiskWriteError]
) -> None:
    gate = threading.Event()
    workers = Workers(1, "qoff-test", error)
    calls = [lambda: gate.wait(TIMEOUT_S), lambda: end(death), lambda: None, lambda: None]
    first, *others = [workers.submit(call) for call in calls]
    gate.set()
    assert first.result(TIMEOUT_S)
    for future in [*others, workers.submit(lambda: None)]:
        with pytest.raises(error, match=r"qoff-test.*died") as found:
            future.result(TIMEOUT_S)
        assert repr(death) in str(found.value)
    workers.close()
    assert not workers.alive


def test_a_thread_that_is_refused_is_told_and_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a limit of a container's processes."""
    start, before = threading.Thread.start, threading.active_count()

    def third_is_refused(thread: threading.Thread) -> None:
        if threading.active_count() == before + 2:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", third_is_refused)
    with pytest.raises(QoffError, match="refused a new thread; raise the limit"), refusals():
        Workers(4, "qoff-test")
    assert threading.active_count() == before


def test_an_ordinary_error_is_of_its_call_alone() -> None:
    workers = Workers(1, "qoff-test")
    failing, passing = workers.submit(lambda: end(RuntimeError("a bug"))), workers.submit(lambda: 7)
    with pytest.raises(RuntimeError, match="a bug"):
        failing.result(TIMEOUT_S)
    assert passing.result(TIMEOUT_S) == 7
    assert workers.alive
    workers.close()


def test_close_fails_what_is_queued_and_finishes_what_runs() -> None:
    started, gate = threading.Event(), threading.Event()

    def run() -> bool:
        started.set()
        return gate.wait(TIMEOUT_S)

    workers = Workers(1, "qoff-test")
    running, queued = workers.submit(run), workers.submit(lambda: None)
    assert workers.alive
    assert started.wait(TIMEOUT_S)
    closing = threading.Thread(target=workers.close)
    closing.start()
    with pytest.raises(DiskReadError, match="closed"):
        queued.result(TIMEOUT_S)
    gate.set()
    closing.join(TIMEOUT_S)
    assert running.result(0)
    assert not workers.alive
