"""Times of calls on a CUDA device, with cold caches, the alternatives in turn.

`launched` is the time from an idle GPU to its being idle again, as the host sees it: Python and the
launch included. `replayed` is the time on the GPU alone: a CUDA graph of several calls between two
events, over their number. Each call of a graph has operands of its own, so none finds the data of
the one before in L2; and the time at which a graph starts and ends, some 2 us, counts a tenth.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from bench.gpu.case import Call

CALLS = 10  # of a graph, where memory holds the operands of as many
_WARMUPS = 3
_ROUNDS = 30
_ROUNDS_MIN = 5
_LEAST_FLUSH = 64 << 20


@dataclass(frozen=True)
class CallTimes:
    """Seconds of one call, sampled several times."""

    launched: tuple[float, ...]
    replayed: tuple[float, ...]  # by events without a graph where the calls cannot be captured
    captured: bool = True
    calls: int = 1  # with operands of their own that a sample of `replayed` is the mean of

    @property
    def seconds(self) -> float:
        return statistics.median(self.replayed)

    @property
    def launched_seconds(self) -> float:
        return statistics.median(self.launched)

    @property
    def spread(self) -> float:
        """Interquartile range over the median of `replayed`."""
        low, _, high = statistics.quantiles(self.replayed, n=4, method="inclusive")
        return (high - low) / self.seconds


class Timer(Protocol):
    """What the bench asks of a clock."""

    def measure(
        self, calls: Mapping[str, Sequence[Call]], budget_s: float
    ) -> dict[str, CallTimes]: ...


class CudaTimer:
    """Measures on one CUDA device; before every sample, L2 is filled with other data by reading it.

    Were it written, calls would wait for its way back to memory, up to the size of L2.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        l2 = int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0))
        self._flush = torch.zeros(max(4 * l2, _LEAST_FLUSH) // 4, device=device)

    def measure(self, calls: Mapping[str, Sequence[Call]], budget_s: float) -> dict[str, CallTimes]:
        """Time the alternatives in turn, A B C B C A ..., at most about `budget_s` seconds.

        The calls of an alternative do the same on operands of their own.
        """
        graphs = {name: self._capture(several) for name, several in calls.items()}
        names = list(calls)
        launched: dict[str, list[float]] = {name: [] for name in names}
        replayed: dict[str, list[float]] = {name: [] for name in names}
        end = time.monotonic() + budget_s
        for done in range(_ROUNDS):
            if done >= _ROUNDS_MIN and time.monotonic() > end:
                break
            first = done % len(names)
            for name in names[first:] + names[:first]:
                launched[name].append(self._launched(calls[name][done % len(calls[name])]))
                replayed[name].append(self._replayed(graphs[name], calls[name]))
        return {
            name: CallTimes(
                tuple(launched[name]),
                tuple(replayed[name]),
                graphs[name] is not None,
                len(calls[name]),
            )
            for name in names
        }

    def _capture(self, calls: Sequence[Call]) -> torch.cuda.CUDAGraph | None:
        """Warm up (which compiles) and capture; None for calls that cannot be captured."""
        stream, current = torch.cuda.Stream(self.device), torch.cuda.current_stream(self.device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for call in [*[calls[0]] * _WARMUPS, *calls[1:]]:
                call()
        current.wait_stream(stream)
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        try:
            # A capture that fails leaves its own stream as the current one.
            with torch.cuda.stream(current), torch.cuda.graph(graph):
                for call in calls:
                    call()
        except RuntimeError:
            torch.cuda.synchronize(self.device)
            return None
        return graph

    def _launched(self, call: Call) -> float:
        self._flush.sum()
        torch.cuda.synchronize(self.device)
        start = time.perf_counter()
        call()
        torch.cuda.synchronize(self.device)
        return time.perf_counter() - start

    def _replayed(self, graph: torch.cuda.CUDAGraph | None, calls: Sequence[Call]) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flush.sum()
        begin.record()
        if graph is not None:
            graph.replay()
        else:
            for call in calls:
                call()
        end.record()
        torch.cuda.synchronize(self.device)
        return float(begin.elapsed_time(end)) / 1e3 / len(calls)
