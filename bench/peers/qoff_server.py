"""`qoff serve` in a process of its own, whose end can be told afterwards."""

from __future__ import annotations

import ctypes
import json
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Thread
from typing import Any

from bench.demo import fetch_checkpoint
from qoff.errors import QoffError

CONTEXT = 512  # tokens of a sequence
_LAST = 3  # lines of what it said
_ENDING_S = 20.0  # from where it listens no more to its end
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Address:
    """Where a server is asked, and what it wants of a request beside what all get."""

    url: str  # ends in /v1
    model: str
    more: dict[str, Any] = field(default_factory=dict)
    pid: int = 0


@dataclass
class Served:
    """A server that runs, or has. said: the last lines of its standard error."""

    process: subprocess.Popen[str]
    said: deque[str] = field(default_factory=lambda: deque(maxlen=_LAST))
    address: Address = field(default_factory=lambda: Address("", ""))
    _reader: Thread | None = None

    def listen(self) -> None:
        """Wait until it is ready, and go on reading what it says: a full pipe would block it.

        Raises QoffError if it ends.
        """
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said.append(line.strip())
            if '"ready"' in line:
                ready = json.loads(line)
                self.address = Address(ready["url"] + "/v1", ready["model"], pid=self.process.pid)
                break
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()
        if not self.address.url:
            raise QoffError(self.ended())

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said.append(line.strip())

    def close(self) -> None:
        """End it, and wait for that; idempotent."""
        self.process.terminate()
        self.process.wait()
        if self._reader is not None:
            self._reader.join()
        assert self.process.stderr is not None
        self.process.stderr.close()

    def ended(self) -> str:
        """How it has ended, in one line; "" while it runs. Waits some seconds for an end."""
        try:
            status = self.process.wait(_ENDING_S)
        except subprocess.TimeoutExpired:
            return ""
        if self._reader is not None:
            self._reader.join(_ENDING_S)  # a child of it may have the pipe still open
        how = f"with status {status}" if status >= 0 else f"by {signal.Signals(-status).name}"
        return f"the server has ended {how}; its last lines: {' | '.join(self.said) or 'none'}"


@contextmanager
def serving(places: int, model: str = "", options: Sequence[str] = ()) -> Iterator[Served]:
    """`qoff serve` with so many places, each of 512 tokens; by default the demo model.

    Raises QoffError if it ends before it is ready.
    """
    command = [sys.executable, "-m", "qoff", "serve", model or str(fetch_checkpoint())]
    command += ["--port", "0", "--batch-size", str(places), "--context", str(CONTEXT), *options]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, errors="replace", preexec_fn=end_with_parent
    )
    served = Served(process)
    try:
        served.listen()
        yield served
    finally:
        served.close()


def end_with_parent() -> None:
    """In a new process: SIGTERM when the thread that started it ends, even by SIGKILL."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
