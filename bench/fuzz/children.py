"""Inputs in forked children with bounds of time and memory, and what went wrong there."""

from __future__ import annotations

import faulthandler
import json
import mmap
import os
import resource
import signal
import struct
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from qoff.errors import QoffError

SECONDS = 2.0  # of CPU time for an input
_WALL = 30.0  # seconds; for what waits instead of computing
_MEMORY = 512 << 20  # bytes an input may add to the process
_LIMIT = 2 << 30  # bytes of address space beyond what the process has
_SIGNALS = {
    signal.SIGPROF: f"hang: more than {SECONDS:g} s of CPU time",
    signal.SIGALRM: f"hang: {_WALL:g} s without an end",
}
_ROOT = str(Path(__file__).resolve().parents[2])


@dataclass(frozen=True)
class Finding:
    """What went wrong. where: the innermost line of qoff's sources, empty for a signal."""

    number: int  # of the input
    kind: str
    where: str
    message: str

    @property
    def signature(self) -> tuple[str, str]:
        """What findings of one fault have in common."""
        return self.kind, self.where


def run_all(
    numbers: Iterable[int], run: Callable[[int], object], chunk: int = 2000
) -> Iterator[int | Finding]:
    """Run inputs by number in forked children; yields each number that is done, and findings.

    `run` raises QoffError, or returns. A child that dies is replaced.
    """
    left = list(numbers)
    while left:
        done, found, status = _child(left[:chunk], run)
        yield from found
        yield from left[:done]
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            name = _SIGNALS.get(signal.Signals(number), f"crash: {signal.Signals(number).name}")
            yield Finding(left[done], name, "", "")
            yield left[done]
            done += 1
        left = left[done:]


def _child(numbers: list[int], run: Callable[[int], object]) -> tuple[int, list[Finding], int]:
    """How many inputs a child has done, what it found, and its status."""
    shared = mmap.mmap(-1, 8)
    readable, writable = os.pipe()
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        os.close(readable)
        status = 1
        try:
            _bounded()
            with os.fdopen(writable, "w") as report:
                for i, number in enumerate(numbers):
                    struct.pack_into("<q", shared, 0, i)
                    _one(number, run, report)
                struct.pack_into("<q", shared, 0, len(numbers))
            status = 0
        finally:
            os._exit(status)
    os.close(writable)
    with os.fdopen(readable) as report:
        found = [Finding(*json.loads(line)) for line in report]
    _, status = os.waitpid(pid, 0)
    (done,) = struct.unpack_from("<q", shared, 0)
    if status and not os.WIFSIGNALED(status):
        raise RuntimeError(f"a child ended with status {status} at input {numbers[done]}")
    return done, found, status


def _bounded() -> None:
    faulthandler.disable()  # a crash is reported as a finding
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * mmap.PAGESIZE + _LIMIT
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _one(number: int, run: Callable[[int], object], report: object) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    signal.setitimer(signal.ITIMER_PROF, SECONDS)  # their signals end the process
    signal.setitimer(signal.ITIMER_REAL, _WALL)
    finding: list[object] = []
    try:
        run(number)
    except QoffError:
        pass
    except BaseException as error:
        finding = [type(error).__name__, _place(error), " ".join(str(error).split())[:300]]
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    if grown > _MEMORY and not finding:
        finding = ["memory", "", f"{grown >> 20} MiB"]
    if finding:
        report.write(json.dumps([number, *finding]) + "\n")  # type: ignore[attr-defined]
        report.flush()  # type: ignore[attr-defined]


def _place(error: BaseException) -> str:
    """The innermost line of qoff's sources."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if f.filename.startswith(_ROOT) and "/bench/fuzz/" not in f.filename]
    own = [f for f in own if ".venv" not in f.filename]
    return f"{Path(own[-1].filename).relative_to(_ROOT)}:{own[-1].lineno}" if own else ""
