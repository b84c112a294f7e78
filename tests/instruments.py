"""Hooks of tests, and what tests may not leave behind."""

from __future__ import annotations

import mmap
import threading
import weakref
from collections.abc import Callable, Set
from typing import Any

import torch
from torch import Tensor

from qoff.memory.instrumentation import Instrumentation

POISON = Instrumentation(poison=True)


class KeptPages:
    """Main memory, of which tests see how much is still held."""

    def __init__(self) -> None:
        self._there = weakref.WeakSet[mmap.mmap]()

    def __call__(self, nbytes: int) -> Tensor:
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8)
        pages = mmap.mmap(-1, nbytes)
        self._there.add(pages)
        return torch.frombuffer(pages, dtype=torch.uint8)

    @property
    def nbytes(self) -> int:
        return sum(map(len, self._there))


def threads_beside(before: Set[threading.Thread]) -> list[str]:
    """The names of other threads that run, but of the pool of the CPU and of tqdm's, which stay."""
    left = [thread for thread in threading.enumerate() if thread not in before]
    return [x.name for x in left if not (x.name.startswith("qoff-cpu") or "TMonitor" in str(x))]


def allocated(work: Callable[[], Any]) -> int:
    """The most bytes that torch's allocator held at once of what it gave out meanwhile."""
    with torch.profiler.profile(profile_memory=True) as profile:
        work()
    held = most = 0
    events = profile.profiler.kineto_results.events()
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most
