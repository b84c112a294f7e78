"""Workers: daemon threads that take jobs from one queue, and whose death is never silent."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from qoff.errors import DiskReadError


class Job(Protocol):
    """One piece of work. Exactly one of the two is called to its end, unless its thread dies."""

    def run(self) -> None:
        """Do the work; ordinary errors are the job's own to report."""

    def fail(self, error: Exception) -> None:
        """Report that the work will not be done; may follow a `run` that was cut short."""


class Workers:
    """Threads that run jobs in the order of submission and sleep in the kernel without any.

    When a thread dies, all of them stop, and every job that is queued or comes later fails.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._name = name
        self._jobs: deque[Job] = deque()
        self._changed = threading.Condition()
        self._refusal: DiskReadError | None = None  # why no job is taken any more
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{i}", daemon=True)
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def alive(self) -> bool:
        """Whether every thread is there; false in a process forked from the one that made them."""
        return all(thread.is_alive() for thread in self._threads)

    def submit(self, jobs: Sequence[Job], urgent: bool = False) -> None:
        """Queue jobs, in order; urgent ones go before all that wait. Fails them when stopped."""
        with self._changed:
            refusal = self._refusal
            if refusal is None:
                if urgent:
                    self._jobs.extendleft(reversed(jobs))
                else:
                    self._jobs.extend(jobs)
                self._changed.notify(len(jobs))
        if refusal is not None:
            for job in jobs:
                job.fail(refusal)

    def close(self) -> None:
        """Fail the queued jobs, wait for the running ones and join the threads."""
        self._stop(DiskReadError(f"{self._name}: closed before the read was done"))
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _run(self) -> None:
        job: Job | None = None
        try:
            while (job := self._take()) is not None:
                job.run()
                job = None  # or the memory it filled would live as long as the thread
        except BaseException as cause:
            error = DiskReadError(f"{self._name}: a reading thread died: {cause!r}")
            error.__cause__ = cause
            if job is not None:
                job.fail(error)
            self._stop(error)

    def _take(self) -> Job | None:
        """The next job, waiting for one; None when stopped."""
        with self._changed:
            while not self._jobs and self._refusal is None:
                self._changed.wait()
            return self._jobs.popleft() if self._refusal is None else None

    def _stop(self, error: DiskReadError) -> None:
        with self._changed:
            self._refusal = self._refusal or error
            left = list(self._jobs)
            self._jobs.clear()
            self._changed.notify_all()
        for job in left:
            job.fail(error)
