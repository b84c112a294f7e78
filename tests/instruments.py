"""Hooks of tests, and what tests may not leave behind."""

from __future__ import annotations

import threading
from collections.abc import Set

from qoff.memory.instrumentation import Instrumentation

POISON = Instrumentation(poison=True)


def threads_beside(before: Set[threading.Thread]) -> list[str]:
    """The names of qoff's other threads that run, but of the pool of the CPU, which stays."""
    left = [thread.name for thread in threading.enumerate() if thread not in before]
    return [x for x in left if x.startswith("qoff-") and not x.startswith("qoff-cpu")]
