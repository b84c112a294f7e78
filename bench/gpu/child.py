"""Work in processes that can be lost: a hang or an abort costs what was running, no more.

A child is a fork of a process that has imported everything and has never used the GPU, so it starts
in milliseconds, and what it does to its context of the GPU ends with it. It reports by events, JSON
objects, one a line, through a pipe.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import resource
import selectors
import signal
import sys
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Event = dict[str, Any]
Emit = Callable[[Event], None]

_TAIL = 4000  # characters of a lost child's output that are kept
_LOGGED = 1 << 16  # bytes of a log that are looked at
_POLL_S = 0.2
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl(2)
_KILLED_S = 10.0  # until a child that was killed is gone


@dataclass(frozen=True)
class Job:
    """What one child does. It is killed after `limit_s`, and after `silence_s` without an event."""

    name: str
    do: Callable[[Emit], None]
    limit_s: float
    silence_s: float


@dataclass(frozen=True)
class Ended:
    """How a child ended; `lost` says why if it did not end by itself with success."""

    job: Job
    seconds: float
    lost: str
    killed: bool  # it was, as it took too long
    tail: str  # the end of what it wrote to stdout and stderr


class _Child:
    """One running process, its pipe and its output."""

    def __init__(self, job: Job) -> None:
        self.job, self.start = job, time.monotonic()
        self.heard = self.start
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # closed when the child has ended
        self.pipe, write = os.pipe()
        os.set_blocking(self.pipe, False)
        self._rest = b""
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self.pipe)
            self._run(write)
        os.close(write)

    def _run(self, write: int) -> None:
        """In the child: never returns."""
        status = 1
        try:
            os.setsid()
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
            for stream in (1, 2):
                os.dup2(self._log.fileno(), stream)
            faulthandler.enable(2)

            def emit(event: Event) -> None:
                data = (json.dumps(event) + "\n").encode()
                while data:
                    data = data[os.write(write, data) :]

            self.job.do(emit)
            status = 0
        except SystemExit as left:
            status = left.code if isinstance(left.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def events(self) -> list[Event]:
        """What has come since the last call."""
        try:
            while piece := os.read(self.pipe, 1 << 16):
                self._rest += piece
        except BlockingIOError:
            pass
        *lines, self._rest = self._rest.split(b"\n")
        if lines:
            self.heard = time.monotonic()
        return [json.loads(line) for line in lines]

    def overdue(self, now: float) -> str:
        """Why it has to be killed, if it does."""
        if now - self.heard > self.job.silence_s:
            return f"no sign of life for {self.job.silence_s:.0f} s"
        if now - self.start > self.job.limit_s:
            return f"took longer than {self.job.limit_s:.0f} s"
        return ""

    def ended(self, status: int, why: str) -> Ended:
        killed = bool(why)
        if not why and os.WIFSIGNALED(status):
            why = f"died of {signal.Signals(os.WTERMSIG(status)).name}"
        elif not why and os.WEXITSTATUS(status):
            why = f"exit status {os.WEXITSTATUS(status)}"
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - _LOGGED))
        tail = _tail(self._log.read().decode(errors="replace"))
        self.close()
        return Ended(self.job, time.monotonic() - self.start, why, killed, tail)

    def close(self) -> None:
        os.close(self.pipe)
        self._log.close()


def run(
    jobs: Iterable[Job],
    at_once: int,
    on_event: Callable[[Job, Event], None],
    on_end: Callable[[Ended], Sequence[Job]],
) -> None:
    """Run all jobs, some at once. What `on_end` returns is run, too, before those that wait."""
    waiting, running = deque(jobs), dict[int, _Child]()
    selector = selectors.DefaultSelector()
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                child = _Child(waiting.popleft())
                running[child.pid] = child
                selector.register(child.pipe, selectors.EVENT_READ)
            # A child that ends closes its pipe, which wakes this.
            selector.select(_POLL_S)
            for child in list(running.values()):
                _pass_on(child, on_event)
                why = child.overdue(time.monotonic())
                status = kill(child.pid) if why else _status(child.pid)
                if status is not None:
                    _pass_on(child, on_event)
                    selector.unregister(child.pipe)
                    del running[child.pid]
                    waiting.extendleft(reversed(on_end(child.ended(status, why))))
    finally:
        for child in running.values():
            kill(child.pid)
            child.close()
        selector.close()


def _tail(log: str) -> str:
    """The end of a log. faulthandler writes the innermost frame first: that half of it is kept."""
    crash = log.rfind("Fatal Python error: ")
    end = len(log) if crash < 0 else min(len(log), crash + _TAIL // 2)
    return log[max(0, end - _TAIL) : end]


def _pass_on(child: _Child, on_event: Callable[[Job, Event], None]) -> None:
    for event in child.events():
        on_event(child.job, event)


def kill(pid: int) -> int:
    """End a child and everything that it started; returns its status.

    One that waits for a driver which does not answer cannot be ended: it is left to the system.
    """
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:  # it has not come to be the leader of its group
        os.kill(pid, signal.SIGKILL)
    end = time.monotonic() + _KILLED_S
    while (status := _status(pid)) is None and time.monotonic() < end:
        time.sleep(0.01)
    return signal.SIGKILL if status is None else status


def _status(pid: int) -> int | None:
    """How a child ended, as `os.waitpid` has it; None while it runs."""
    ended, status = os.waitpid(pid, os.WNOHANG)
    return status if ended else None
