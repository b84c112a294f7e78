"""Link-bound rounds: real weights and threads, over a disk that sleeps for as long as bytes take.

The rate of the link is known then, so what is left is the model's: how work overlaps, and what the
seams take.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from bench.demo import fetch_checkpoint
from bench.harness import Bar, Report
from bench.offload import RESIDENT, Case, Work, plans
from qoff.memory.instrumentation import PLAIN, Instrumentation
from qoff.plan.machine import assumed_profile
from qoff.plan.profile import Link, MachineProfile

from .rounds import predicted

_WITHIN = 0.05


class SleepingLink:
    """A path of so many bytes a second, that transfers occupy one after another.

    By how much a sleep was too long, the next transfer counts as asked for earlier.
    """

    def __init__(self, bytes_per_s: float) -> None:
        self._rate, self._free_at, self._late = bytes_per_s, 0.0, 0.0
        self._lock = threading.Lock()

    def take(self, nbytes: int, asked: float) -> None:
        """Sleep until these bytes have passed, asked for at that time; earlier callers' first."""
        with self._lock:
            start = max(self._free_at, asked - self._late)
            self._free_at = until = start + nbytes / self._rate
        time.sleep(max(0.0, until - time.perf_counter()))
        self._late = time.perf_counter() - until

    def preadv(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        """`os.preadv` from behind this link, which takes the time of the real one, too."""
        asked = time.perf_counter()
        count = os.preadv(fd, views, offset)
        self.take(count, asked)
        return count


def behind(disk: float) -> tuple[Instrumentation, MachineProfile]:
    """Hooks that slow the disk down to this rate, and the machine that has such a disk."""
    folder = Path(os.environ.get("TMPDIR", "/tmp"))
    profile = assumed_profile(torch.device("cpu"), folder)
    hooks = replace(PLAIN, preadv=SleepingLink(disk).preadv)
    return hooks, replace(profile, disk_read=Link(disk), notes=())


def measure(quick: bool) -> Report:
    """The plans of `bench.offload` that a link bounds."""
    result = Report(
        "planner-links",
        {"quick": quick},
        "decode rounds over a disk that sleeps",
        ("plan", "measured ms", "cost model ms", "error", "virtual time ms", "error", "limit"),
    )
    disk = 400e6 if quick else 100e6
    work, path = Work(2, 2, 128, 8), fetch_checkpoint()
    errors = {"cost model": 0.0, "virtual time": 0.0}
    for label, plan in plans(path, work, "cpu").items():
        if label == RESIDENT:
            continue
        hooks, machine = behind(disk)
        with Case(path, work, plan, "cpu", hooks) as case:
            case()
            took = case().seconds
            found = predicted(case.llm, machine, work)
        assert found.simulated is not None
        said = found.decode.seconds, found.simulated.decode.seconds
        wrong = [one / took - 1 for one in said]
        result.rows.append(
            (label, f"{took * 1e3:.1f}", f"{said[0] * 1e3:.1f}", f"{wrong[0]:+.1%}",
             f"{said[1] * 1e3:.1f}", f"{wrong[1]:+.1%}", found.decode.limit)
        )  # fmt: skip
        result.measured[label] = {
            "measured_s": took,
            "predicted_s": said[0],
            "simulated_s": said[1],
            "busy_s": dict(found.decode.busy),
        }
        if found.decode.limit == "cpu":
            result.notes.append(f"{label}: not bound by a link, so not counted")
            continue
        errors = {how: max(errors[how], abs(one)) for how, one in zip(errors, wrong, strict=True)}
    for how, error in errors.items():
        result.bars.append(Bar(f"{how}: 1 - largest error", 1 - _WITHIN, 1 - error))
    return result
