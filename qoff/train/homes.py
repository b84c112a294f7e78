"""Homes: where weights, states, gradients and hidden states lie between their uses."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from qoff.memory import DiskReader
from qoff.memory.arena import PAGE, TierArenas, round_up
from qoff.memory.instrumentation import PLAIN, Instrumentation
from qoff.memory.io.copy_stream import CopyStream
from qoff.memory.io.ranges import read_all, write_all
from qoff.memory.io.spill import SpillFile


@dataclass(frozen=True)
class Home:
    """Memory of the host, or a place in the spill file. what: is counted by this name.

    near: the memory is that of a GPU which computes.
    """

    what: str
    nbytes: int
    memory: Tensor | None
    offset: int = 0
    near: bool = False


class Read(Protocol):
    """Bytes on their way to where they are computed with."""

    def result(self) -> None:
        """What is computed from now on has them. Raises DiskReadError."""

    def exception(self) -> BaseException | None:
        """Wait until no byte moves any more; what went wrong."""


class Link(Protocol):
    """Between homes and memory that is computed with: `Homes` on a CPU, `GpuLink` on a GPU."""

    def here(self, home: Home) -> Tensor | None:
        """The memory of a home, if that is computed with as it is."""

    def read(self, home: Home, into: Tensor) -> Read:
        """Start reading the first bytes of a home that is not here."""

    def write(self, home: Home, source: Tensor, then: Callable[[], None]) -> Future[None]:
        """Start writing to a home that is not here; `then` is called when it has ended."""

    def spoil(self, memory: Tensor) -> None:
        """Memory that was read into or written from holds nothing now: poison it, in tests."""


class Homes:
    """The arenas of device and host, and the spill file behind them."""

    def __init__(
        self,
        device: int,
        host: int,
        disk: int,
        folder: Path | None,
        stream: CopyStream | None = None,
        instrumentation: Instrumentation = PLAIN,
    ) -> None:
        """Bytes of each. stream: of a GPU, whose memory is the device's; host memory is pinned.

        With `instrumentation.poison`, memory that is read into is NaN until the read comes. Raises
        BudgetError and DiskWriteError for what cannot be had.
        """
        self._resources = ExitStack()
        arenas = TierArenas({"device": device, "host": host}, stream, instrumentation.pages)
        self._resources.callback(arenas.close)
        self.device, self.host = arenas.arenas["device"], arenas.arenas["host"]
        self.moved: Counter[str] = Counter()  # bytes, by what and "read" or "written"
        self._counting = threading.Lock()
        self._next, self._disk = 0, disk
        self._spill: SpillFile | None = None
        self._poison = instrumentation.poison
        if disk:
            assert folder is not None
            reader = DiskReader(preadv=instrumentation.preadv, clock=instrumentation.clock)
            self._resources.callback(reader.close)
            try:
                self._spill = SpillFile(
                    folder,
                    disk,
                    reader,
                    instrumentation=instrumentation,
                    called="folder for the disk",
                )
            except BaseException:
                self._resources.close()
                raise
            self._resources.callback(self._spill.close)

    def count(self, what: str, nbytes: int) -> None:
        """Bytes that move, in any thread."""
        with self._counting:
            self.moved[what] += nbytes

    def here(self, home: Home) -> Tensor | None:
        """The memory of a home, if it is not on disk."""
        return home.memory

    def closes(self, one: Callable[[], None]) -> None:
        """Call this before all else is closed."""
        self._resources.callback(one)

    def home(self, what: str, nbytes: int, in_memory: bool, near: bool = False) -> Home:
        """A new home of whole pages: on the device, if that is near, in host memory, or on disk."""
        size = round_up(nbytes, PAGE)
        if near:
            return Home(what, size, self.device.alloc(size, what), near=True)
        if in_memory:
            return Home(what, size, self.host.alloc(size, what))
        assert self._next + size <= self._disk
        self._next += size
        return Home(what, size, None, self._next - size)

    def read(self, home: Home, into: Tensor) -> Future[None]:
        """Start reading from disk; the first bytes of a home that is there."""
        assert self._spill is not None
        self.count(f"{home.what} read", into.nbytes)
        self.spoil(into)
        return self._spill.read(home.offset, into)

    def write(self, home: Home, source: Tensor, then: Callable[[], None]) -> Future[None]:
        """Start writing to disk; `then` is called when it has ended, well or not.

        The future is done after `then`: who waits for it sees what that has changed.
        """
        assert self._spill is not None
        self.count(f"{home.what} written", source.nbytes)
        ended: Future[None] = Future()

        def end(write: Future[None]) -> None:
            try:
                then()
                write.result()
            except BaseException as error:
                ended.set_exception(error)
            else:
                ended.set_result(None)

        self._spill.write(home.offset, source).add_done_callback(end)
        return ended

    def spoil(self, memory: Tensor) -> None:
        """`memory` holds nothing: fill it with 0xFF, NaN in floats, if it is to be poisoned."""
        if self._poison:
            memory.fill_(0xFF)

    def save(self, home: Home, fd: int, place: int) -> None:
        """Copy a home to a place of an open file. Raises OSError."""
        if home.memory is not None:
            write_all(fd, home.memory, place)
        elif self._spill is not None:
            self._spill.copy_to(fd, place, home.offset, home.nbytes)

    def restore(self, home: Home, fd: int, place: int) -> None:
        """Copy a place of an open file to a home. Raises OSError."""
        if home.memory is not None:
            read_all(fd, home.memory, place)
        elif self._spill is not None:
            self._spill.copy_from(fd, place, home.offset, home.nbytes)

    def close(self) -> None:
        """Stop all moves and let go of all memory."""
        self._resources.close()
