"""Hooks of tests, and what tests may not leave behind."""

from __future__ import annotations

import threading
from collections.abc import Set

from qoff.memory.instrumentation import Instrumentation

POISON = Instrumentation(poison=True)


def threads_beside(before: Set[threading.Thread]) -> list[str]:
    """The names of other threads that run, but of the pool of the CPU and of tqdm's, which stay."""
    left = [thread for thread in threading.enumerate() if thread not in before]
    return [x.name for x in left if not (x.name.startswith("qoff-cpu") or "TMonitor" in str(x))]
