from __future__ import annotations

import threading

import pytest

from qoff.errors import DiskReadError
from qoff.memory.io.workers import Workers


class Recorded:
    """A job that runs `action`, and tells how it ended."""

    def __init__(self, action: object = None) -> None:
        self.started = threading.Event()
        self.ended = threading.Event()
        self.error: Exception | None = None
        self._action = action

    def run(self) -> None:
        self.started.set()
        if isinstance(self._action, BaseException):
            raise self._action
        if isinstance(self._action, threading.Event):
            self._action.wait(20)
        self.ended.set()

    def fail(self, error: Exception) -> None:
        self.error = error
        self.ended.set()


@pytest.mark.parametrize("death", [SystemExit(3), KeyboardInterrupt(), RuntimeError("a bug")])
def test_death_fails_the_job_at_hand_the_queued_and_the_later(death: BaseException) -> None:
    gate = threading.Event()
    jobs = [Recorded(gate), Recorded(death), Recorded(), Recorded()]
    workers = Workers(1, "qoff-test")
    workers.submit(jobs)
    gate.set()
    assert all(job.ended.wait(20) for job in jobs)
    assert jobs[0].error is None
    assert all(isinstance(job.error, DiskReadError) for job in jobs[1:])
    late = Recorded()
    workers.submit([late])
    assert repr(death) in str(late.error)
    workers.close()
    assert not workers.alive


def test_close_fails_what_is_queued_and_finishes_what_runs() -> None:
    gate = threading.Event()
    running, queued = Recorded(gate), Recorded()
    workers = Workers(1, "qoff-test")
    workers.submit([running, queued])
    assert workers.alive
    assert running.started.wait(20)
    closing = threading.Thread(target=workers.close)
    closing.start()
    assert queued.ended.wait(20)
    gate.set()
    closing.join(20)
    assert running.ended.is_set()
    assert running.error is None
    assert "closed" in str(queued.error)
    assert not workers.alive
