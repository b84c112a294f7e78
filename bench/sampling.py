"""Sampling alternatives in turn, on a machine that may not be quiet."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

import torch

from qoff.measure.samples import QUIET, Samples, foreign_cpu_s

_PAUSE_S = 0.02  # idle threads of the alternative before have stopped spinning by then


def interleaved(
    alternatives: Mapping[str, Callable[[], float]],
    rounds: int,
    pause: float = _PAUSE_S,
    foreign: Callable[[], float] | None = None,
) -> dict[str, Samples]:
    """Sample the alternatives in turn, A B C B C A ..., so that all see the same noise.

    Each callable measures itself once and returns its number. On a shared machine a round in which
    others took more than a tenth of a core (`foreign`: their CPU seconds so far) is repeated, up to
    twice as many rounds in all; the `rounds` that others disturbed least count.
    """
    names, foreign = list(alternatives), foreign or others_cpu_s
    found: list[tuple[float, dict[str, float]]] = []
    quiet = 0
    while quiet < rounds and len(found) < 2 * rounds:
        first = len(found) % len(names)
        before, start = foreign(), time.perf_counter()
        values = {}
        for name in names[first:] + names[:first]:
            time.sleep(pause)
            values[name] = alternatives[name]()
        others = (foreign() - before) / (time.perf_counter() - start)
        quiet += others < QUIET
        found.append((others, values))
    kept = sorted(found, key=lambda entry: entry[0])[:rounds]
    return {name: Samples(tuple(values[name] for _, values in kept)) for name in names}


def others_cpu_s() -> float:
    """CPU seconds that others took since boot, which processes this one started are not."""
    import psutil  # rented GPUs may lack it, where processes are not counted

    ended = os.times()
    ours = ended.children_user + ended.children_system
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            ours += sum(child.cpu_times()[:4])  # user and system, of ended children of its own too
    return foreign_cpu_s() - ours


def timed(call: Callable[[], object], least_s: float = 0.02) -> Callable[[], float]:
    """Return a measurement: seconds of one call, averaged over calls of `least_s` together."""
    call()
    start = time.perf_counter()
    call()
    calls = max(1, round(least_s / (time.perf_counter() - start)))

    def measure() -> float:
        call()  # wakes the threads
        start = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - start) / calls

    return measure


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Let torch use `count` threads for the length of a `with` block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
