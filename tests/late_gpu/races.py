"""Which bytes each task reads and writes, and tasks that nothing orders: a happens-before check.

Every task has the clock of its stream: up to which task of each other stream all was done before
it began. Two tasks of different streams are a race if one of them writes bytes that the other one
uses, and neither is in the other's clock. That is found in whatever order they were done.

Operands of torch's ops are read and written as their schemas say, whole; of a kernel it is noted
what it loads and stores. The host has one clock: what one of its threads waited for, all know of.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch import Tensor

from tests.bounds import Operands

if TYPE_CHECKING:
    from .streams import LateStream

_OWN = ("cuda", "install", "races", "streams", "tensors")
_NOT_CALLERS = ("/site-packages/", "/lib/python", *(f"/late_gpu/{name}.py" for name in _OWN))
_PAST = 512  # accesses of a stream to a region, from which on those that all know of are dropped


class Runs(NamedTuple):
    """Bytes by their addresses: `first[i]` up to `end[i]`, in order and apart."""

    first: np.ndarray[Any, Any]
    end: np.ndarray[Any, Any]

    def common(self, other: Runs) -> int | None:
        """The first byte that is of both."""
        at = np.searchsorted(other.end, self.first, side="right")
        met = np.flatnonzero(np.append(other.first, np.iinfo(np.int64).max)[at] < self.end)
        return int(max(self.first[met[0]], other.first[at[met[0]]])) if len(met) else None

    def within(self, first: int, end: int) -> Runs:
        keep = (self.end > first) & (self.first < end)
        return Runs(self.first[keep], self.end[keep])

    def covers(self, other: Runs) -> bool:
        single = len(self.first) == 1
        return single and bool(self.first[0] <= other.first[0] and other.end[-1] <= self.end[0])


def joined(first: np.ndarray[Any, Any], end: np.ndarray[Any, Any]) -> Runs:
    """Bytes in any order, several times perhaps."""
    order = np.argsort(first, kind="stable")
    first, end = first[order], np.maximum.accumulate(end[order])
    begins = np.flatnonzero(np.append(True, first[1:] > end[:-1]))
    return Runs(first[begins], end[np.append(begins[1:], len(first)) - 1])


def runs_of(x: Tensor) -> Runs:
    """The bytes of a tensor's numbers."""
    size, start = x.element_size(), x.data_ptr()
    if x.is_contiguous():
        return Runs(np.array([start]), np.array([start + size * x.numel()]))
    dims = sorted((s * size, n) for n, s in zip(x.shape, x.stride(), strict=True) if n > 1 and s)
    while dims and dims[0][0] <= size:  # they follow each other
        stride, count = dims.pop(0)
        size += stride * (count - 1)
    first = np.array([start])
    for stride, count in dims:
        first = (first + stride * np.arange(count)[:, None]).ravel()
    return joined(first, first + size)


class Region:
    """Memory that several streams may use: a storage of the device, or pinned memory."""

    def __init__(self, start: int, nbytes: int) -> None:
        self.start, self.end = start, start + nbytes
        self.past: Past = {}


class _Access(NamedTuple):
    seq: int
    name: str
    writes: bool
    runs: Runs


Past = dict["LateStream", list[_Access]]


@dataclass(eq=False)
class Uses:
    """What a task will use. kernel: what it loads and stores is seen when it is done."""

    reads: list[tuple[Region, Tensor]] = field(default_factory=list)
    writes: list[tuple[Region, Tensor]] = field(default_factory=list)
    kernel: list[Region] = field(default_factory=list)
    name: str = ""
    stream: LateStream | None = None
    seq: int = 0
    knows: dict[LateStream, int] = field(default_factory=dict)

    def asked(self, name: str, stream: LateStream) -> None:
        """It is queued: this is its clock."""
        self.name, self.stream, self.seq = f"{name} ({_caller()})", stream, stream.count
        self.knows = dict(stream.knows)

    def found(self, seen: Seen) -> list[tuple[Region, bool, Runs]]:
        """The bytes of each region, and whether they are written."""
        both = ((self.reads, False), (self.writes, True))
        found = [(r, w, runs_of(x)) for uses, w in both for r, x in uses if x.numel()]
        for writes, region in product((False, True), {id(r): r for r in self.kernel}.values()):
            runs = seen.runs(writes).within(region.start, region.end)
            if len(runs.first):
                found.append((region, writes, runs))
        return found

    def meet(self, past: Past, writes: bool, runs: Runs) -> str | None:
        """Add an access to those of the past; a race with one of them."""
        race = None
        for stream, accesses in past.items():
            for one in reversed(accesses if stream is not self.stream else ()):
                if one.seq <= self.knows.get(stream, 0):
                    break
                if writes and one.writes and (_poisons(self.name) or _poisons(one.name)):
                    continue
                if (writes or one.writes) and one.runs.common(runs) is not None:
                    how = "writes" if writes else "reads"
                    did = "writes" if one.writes else "reads"
                    mine, other = f"{self.name} of {self.stream}", f"{one.name} of {stream}"
                    race = f"race: {mine} {how} what {other} {did}"
        assert self.stream is not None
        own = past.setdefault(self.stream, [])
        while own and (writes or not own[-1].writes) and runs.covers(own[-1].runs):
            own.pop()  # who meets it meets this one
        own.append(_Access(self.seq, self.name, writes, runs))
        return race


class Seen:
    """What a kernel loads and stores: tests.bounds shows it each access."""

    def __init__(self) -> None:
        self._first: dict[bool, list[Any]] = {False: [], True: []}
        self._end: dict[bool, list[Any]] = {False: [], True: []}

    def add(self, writes: bool, addresses: Any, nbytes: int) -> None:
        first = np.sort(addresses.ravel().astype(np.int64))
        if (first[-1] - first[0]) == nbytes * (len(first) - 1):
            first, end = first[:1], first[-1:] + nbytes
        else:
            first, end = joined(first, first + nbytes)
        self._first[writes].append(first)
        self._end[writes].append(end)

    def runs(self, writes: bool) -> Runs:
        if not self._first[writes]:
            return Runs(np.empty(0, np.int64), np.empty(0, np.int64))
        return joined(np.concatenate(self._first[writes]), np.concatenate(self._end[writes]))


def _poisons(name: str) -> bool:
    """Whether a task is a test's poison for memory that was given back.

    A copy that nobody waited for, as its unit was skipped, may come before it or after it.
    """
    return name.startswith("aten::fill_.Scalar (io/copy_stream.py:")


def _caller() -> str:
    """Who asked for it: the innermost line that is not the late GPU's, torch's or Triton's."""
    frame = sys._getframe(2)
    while frame.f_back is not None:
        file = frame.f_code.co_filename
        if not any(part in file for part in _NOT_CALLERS):
            break
        frame = frame.f_back
    return f"{'/'.join(frame.f_code.co_filename.rsplit('/', 2)[1:])}:{frame.f_lineno}"


def done(
    run: Callable[[], object], uses: Uses, graph: Uses | None, within: dict[Region, Past]
) -> list[str]:
    """Do a task and note what it uses; its races.

    graph: the replay that it is of, whose clock it has for tasks of others. within: what tasks of
    that replay used before it, by the clocks of the capture.
    """
    seen = Seen()
    Operands.seen = seen if uses.kernel else None
    try:
        run()
    finally:
        Operands.seen = None
    races = []
    for region, writes, runs in uses.found(seen):
        outer = uses
        if graph is not None:
            races.append(uses.meet(within.setdefault(region, {}), writes, runs))
            outer = replace(graph, name=uses.name)
        races.append(outer.meet(region.past, writes, runs))
    return [race for race in races if race is not None]


def forget(uses: Uses, floor: Callable[[LateStream], int]) -> None:
    """Drop what all tasks that are not done know of: up to `floor` of each stream."""
    regions = [region for region, _ in (*uses.reads, *uses.writes)]
    for region in (*regions, *uses.kernel):
        for stream, accesses in region.past.items():
            if len(accesses) > _PAST:
                least = floor(stream)
                accesses[:] = [one for one in accesses if one.seq > least]
