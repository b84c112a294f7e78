"""A machine in virtual time: links that bytes occupy one after another, processors that compute."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Self

import numpy as np
from numpy.typing import NDArray

from qoff.memory.io.virtual import VirtualClock
from qoff.plan.profile import Link, MachineProfile

_CLOSE_S = 1e-9


@dataclass
class Stolen:
    """Seconds that moving bytes takes from what the CPU computes, spread over the time it takes."""

    total: float = 0.0
    parts: deque[tuple[float, float, float]] = field(default_factory=deque)  # begin, end, seconds

    def add(self, begin: float, end: float, seconds: float) -> None:
        """Note some, which are taken evenly."""
        if seconds:
            self.parts.append((begin, end, seconds))

    def until(self, now: float) -> float:
        """Seconds in all that were taken before."""
        kept: deque[tuple[float, float, float]] = deque()
        found = 0.0
        for begin, end, seconds in self.parts:
            if end <= now:
                self.total += seconds
            else:
                kept.append((begin, end, seconds))
                found += seconds * max(0.0, now - begin) / (end - begin)
        self.parts = kept
        return self.total + found


class VirtualLink:
    """A link that transfers occupy one after another. bytes: that went over it.

    through: another one that they occupy, too: the memory beside a GPU. rate: may be changed.
    """

    def __init__(
        self,
        clock: VirtualClock,
        link: Link,
        cores: int = 1,
        stolen: Stolen | None = None,
        through: VirtualLink | None = None,
    ) -> None:
        self._clock, self._stolen, self._through = clock, stolen, through
        self.rate, self._request_s = link.bytes_per_s, link.request_s
        self._taken, self._asked = link.cpu_s_per_byte / cores, link.cpu_s_per_request / cores
        self._alone_s = link.small_s
        self._free_at = 0.0
        self.bytes = 0

    @property
    def free_at(self) -> float:
        """When all that was started has arrived."""
        return self._free_at

    def ask(self) -> None:
        """A request more, whatever it moves."""
        self._free_at = max(self._clock.now(), self._free_at) + self._request_s
        self._interrupt()

    def move_alone(self, nbytes: int) -> None:
        """Have a small request move bytes behind all others, and wait until they have arrived."""
        self._interrupt()
        self._clock.sleep_until(self.start(nbytes) + self._alone_s)

    def _interrupt(self) -> None:
        """Take from the CPU what a request does."""
        if self._stolen is not None:
            now = self._clock.now()
            self._stolen.add(now, now + self._asked, self._asked)

    def start(self, nbytes: int) -> float:
        """Have bytes moved behind all others; when they will have arrived."""
        begin = max(self._clock.now(), self._free_at)
        self._free_at = end = begin + nbytes / self.rate
        self.bytes += nbytes
        if self._stolen is not None:
            self._stolen.add(begin, end, nbytes * self._taken)
        return end if self._through is None else max(end, self._through.start(nbytes))

    def queue(
        self,
        nbytes: NDArray[np.int64],
        requests: int = 1,
        ready: NDArray[np.float64] | None = None,
        in_order: bool = False,
    ) -> NDArray[np.float64]:
        """Have several moved, one behind another; when each will have arrived.

        requests: that each takes. ready: when each may begin; others may move until then, but for
        those behind it if they are `in_order`.
        """
        if not len(nbytes):
            return np.zeros(0)
        now, total = self._clock.now(), int(nbytes.sum())
        begin, each = max(now, self._free_at), requests * self._request_s + nbytes / self.rate
        summed = np.cumsum(each)
        ends: NDArray[np.float64] = begin + summed
        if in_order and ready is not None:
            ends = summed + np.maximum.accumulate(np.maximum(begin, ready) - summed + each)
        self._free_at = float(ends[-1])
        if ready is not None:
            ends = np.maximum(ends, ready + each)
        self.bytes += total
        if self._stolen is not None:
            asked = requests * len(nbytes) * self._asked
            self._stolen.add(now, now + asked, asked)
            self._stolen.add(begin, float(ends[-1]), total * self._taken)
        if self._through is not None:
            ends = np.maximum(ends, self._through.queue(nbytes, 0, ready))
        return ends

    def follow(self, other: VirtualLink) -> None:
        """Move nothing more before what is on the way over the other has arrived."""
        self._free_at = max(self._free_at, other._free_at)

    def move(self, nbytes: int) -> None:
        """Move bytes, and wait until they have arrived."""
        self._clock.sleep_until(self.start(nbytes))


class VirtualMachine:
    """What a profile describes. computed_s: seconds that its processors were busy.

    chunk: bytes of a read. loading: reads take no time yet.
    """

    def __init__(self, profile: MachineProfile, clock: VirtualClock, chunk: int = 1 << 20) -> None:
        self.profile, self.clock, self.chunk = profile, clock, chunk
        self.loading = True
        self._stolen = Stolen()
        self.computed_s = 0.0
        memory = None
        if profile.on_gpu:
            memory = VirtualLink(clock, Link(profile.host.bytes_per_s))
        self._memory = memory

        def link(of: Link) -> VirtualLink:
            return VirtualLink(clock, of, profile.cores, self._stolen, memory)

        self.read, self.write = link(profile.disk_read), link(profile.disk_write)
        self.to_device, self.from_device = link(profile.to_device), link(profile.from_device)

    @property
    def bytes(self) -> Mapping[str, int]:
        """What went over each link."""
        return {
            "disk read": self.read.bytes,
            "disk write": self.write.bytes,
            "to device": self.to_device.bytes,
            "from device": self.from_device.bytes,
        }

    def compute(self, seconds: float, on_host: bool = False, nbytes: int = 0) -> None:
        """Be busy for so long; on a CPU for longer, where bytes are moved meanwhile.

        on_host: the CPU beside a GPU computes. nbytes: that it reads of host memory.
        """
        clock = self.clock
        start, self.computed_s = clock.now(), self.computed_s + seconds
        if self._memory is not None and nbytes:
            self._memory.start(nbytes)
        if self.profile.on_gpu and not on_host:
            clock.sleep_until(start + seconds)
            return
        before, until = self._stolen.until(start), start + seconds
        clock.sleep_until(until)
        while (taken := self._stolen.until(until) - before) > until - start - seconds + _CLOSE_S:
            until = start + seconds + taken
            clock.sleep_until(until)


class OnMachine:
    """What is open on a machine in virtual time. Close it, or use it as a context manager."""

    def __init__(self, machine: VirtualMachine) -> None:
        self.machine, self._own = machine, ExitStack()

    def close(self) -> None:
        """Let go of everything; may be repeated."""
        self._own.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
