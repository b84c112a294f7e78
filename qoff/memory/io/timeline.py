"""Timeline: what ran when, on which lane; written as a Chrome trace."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from qoff.errors import ArgumentError, DiskWriteError


@dataclass(frozen=True)
class Interval:
    """Something that took from `start` to `stop`, in seconds of `time.perf_counter`."""

    lane: str  # "compute", or a link such as "disk to host"
    name: str
    start: float
    stop: float
    nbytes: int = 0


def checked_path(path: str | PathLike[str]) -> Path:
    """The path of a trace to be. Raises ArgumentError for one that cannot be written."""
    where = Path(path)
    if where.is_dir() or not os.access(where.parent, os.W_OK):
        raise ArgumentError(f"no trace can be written to {where}; name a file in a folder of yours")
    return where


class Timeline:
    """Collects intervals from any thread."""

    def __init__(self) -> None:
        self._intervals: list[Interval] = []
        self._arrived: dict[str, float] = {}  # by lane, when the last transfer did
        self._lock = threading.Lock()

    def add(self, lane: str, name: str, start: float, stop: float, nbytes: int = 0) -> None:
        """Note one interval."""
        with self._lock:
            self._intervals.append(Interval(lane, name, start, stop, nbytes))

    def arrived(self, lane: str, name: str, asked: float, nbytes: int) -> None:
        """Note a transfer that has just ended, of a lane on which several are queued.

        It began when it was asked for, or when the one before it had arrived.
        """
        with self._lock:
            stop = time.perf_counter()
            start = max(asked, self._arrived.get(lane, 0.0))
            self._arrived[lane] = stop
            self._intervals.append(Interval(lane, name, start, stop, nbytes))

    @contextmanager
    def span(self, lane: str, name: str, nbytes: int = 0) -> Iterator[None]:
        """Note how long a `with` block takes that raises nothing."""
        start = time.perf_counter()
        yield
        self.add(lane, name, start, time.perf_counter(), nbytes)

    @property
    def intervals(self) -> tuple[Interval, ...]:
        """What has been noted so far."""
        with self._lock:
            return tuple(self._intervals)

    def write(self, path: Path) -> None:
        """Write the JSON that chrome://tracing and Perfetto read (Trace Event Format).

        Raises DiskWriteError; then no file is there.
        """
        found = self.intervals
        origin = min((x.start for x in found), default=0.0)
        lanes = {lane: i for i, lane in enumerate(dict.fromkeys(x.lane for x in found))}
        events: list[dict[str, object]] = [
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": i, "args": {"name": lane}}
            for lane, i in lanes.items()
        ]
        events += [
            {
                "ph": "X",
                "name": x.name,
                "cat": x.lane,
                "pid": 0,
                "tid": lanes[x.lane],
                "ts": (x.start - origin) * 1e6,
                "dur": (x.stop - x.start) * 1e6,
                "args": {"bytes": x.nbytes},
            }
            for x in found
        ]
        try:
            path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
        except OSError as error:
            with suppress(OSError):
                if path.is_file():  # else a device
                    path.unlink()  # a part of it is none
            raise DiskWriteError(
                f"{path}: the trace cannot be written: {error.strerror or error}"
            ) from error
