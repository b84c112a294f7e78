"""The whole bench without a GPU: Triton interprets the kernels on tiny shapes, and three ops fail.

One hangs, one aborts and one returns wrong numbers; all others must come home.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from bench.gpu import ops
from bench.gpu.case import Call, TimedCase
from bench.gpu.model_shapes import ModelShape
from bench.gpu.timer import CallTimes
from qoff.memory.io.copy_stream import Copy, CopyStream, Event

FAULTS: Mapping[str, str] = MappingProxyType(
    {"rope": "hang", "merge": "abort", "gated_silu": "wrong"}
)
OPS = (*FAULTS, "w4_linear", "rms_norm", "quantize")
COMPILED = ("gated_silu",)
TESTS = ("tests/memory/test_transfers.py",)
SILENCE_S = 8.0  # until the op that hangs is taken to do so
TINY = ModelShape("tiny", 64, 2, 1, 64, 64, 128)


class HostTimer:
    """Times one call each by the clock of the host: numbers that mean nothing."""

    def measure(self, calls: Mapping[str, Sequence[Call]], budget_s: float) -> dict[str, CallTimes]:
        del budget_s
        found = {}
        for name, several in calls.items():
            start = time.perf_counter()
            several[0]()
            seconds = (time.perf_counter() - start,) * 3
            found[name] = CallTimes(seconds, seconds, False, len(several))
        return found


def cases(op: str) -> Iterator[TimedCase]:
    """The smallest case of an op."""
    yield from islice(ops.module(op).cases(True, (TINY,)), 1)


def break_op(op: str, kind: str) -> None:
    """Put a fault into the launcher that an op's checks call."""
    module = ops.module(op)
    launch: Callable[..., Any] = getattr(module, op)

    def broken(*args: Any, **kwargs: Any) -> Any:
        if kind == "hang":
            time.sleep(1e6)
        if kind == "abort":
            os.abort()
        return _spoiled(launch(*args, **kwargs))

    setattr(module, op, broken)


class _Now:
    """A point that is reached."""

    def synchronize(self) -> None:
        pass


class _HostStream(CopyStream):
    """Copies at once, from main memory to main memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def allocate(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def pin(self, memory: Tensor) -> None:
        pass

    def unpin(self, memory: Tensor) -> None:
        pass

    def copy(self, source: Tensor, memory: Tensor, after: Event | None, timed: bool) -> Copy:
        memory.copy_(source)
        return Copy(_Now())

    def recycle(self, memory: Tensor, poison: bool) -> Event:
        return _Now()

    def order_after(self, event: Event) -> None:
        pass

    def close(self) -> None:
        pass


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Have trainings copy as if the CPU were a GPU."""
    import qoff.train

    names = vars(sys.modules[qoff.train.offload.__module__])
    own = names["streams_of"]
    names["streams_of"] = lambda device: (_HostStream(device), _HostStream(device))
    try:
        yield
    finally:
        names["streams_of"] = own


def _spoiled(result: Any) -> Any:
    if isinstance(result, Tensor):
        return result * 1.5
    return tuple(map(_spoiled, result))
