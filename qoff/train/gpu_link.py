"""Between homes in host memory or on disk and the memory of a GPU, beside what it computes."""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from qoff.budgets import resolve_device
from qoff.errors import ArgumentError
from qoff.memory.io.copy_stream import CopyStream, Event
from qoff.memory.io.workers import Workers

from .gradients import nothing
from .homes import Home, Homes

STAGING, BUFFERS = 8 << 20, 4  # bytes of a piece between disk and GPU at most, how many there are
_THREADS = 2  # each way: while one waits for a copy, another reads or writes


class Arrival:
    """A copy to the GPU that was asked for."""

    def __init__(self, copy: Future[Event], stream: CopyStream) -> None:
        self._copy, self._stream = copy, stream

    def result(self) -> None:
        """Have what the caller's stream computes next wait for it. Raises DiskReadError."""
        self._stream.order_after(self._copy.result())

    def exception(self) -> BaseException | None:
        """Wait until no byte is copied any more; what went wrong."""
        error = self._copy.exception()
        if error is None:
            self._copy.result().synchronize()
        return error


class GpuLink:
    """Reads homes into memory of a GPU and writes them from there, as `Homes` does on a CPU.

    up, down: streams for copies to the GPU and from it. staging: buffers in pinned memory, for
    homes on disk. `read` and `write` are called in the thread that computes, whose stream has then
    done with memory that is read into, and has made what is written. poison: what is read into is
    NaN until the copy comes.
    """

    def __init__(
        self,
        homes: Homes,
        up: CopyStream,
        down: CopyStream,
        staging: list[Tensor],
        poison: bool = False,
    ) -> None:
        self._homes, self._up, self._down, self._poison = homes, up, down, poison
        # Staging buffers, each with the copy that must have ended before it is used again.
        self._staging: queue.SimpleQueue[tuple[Tensor, Event | None]] = queue.SimpleQueue()
        self._piece = len(staging[0]) if staging else 0
        for buffer in staging:
            self._staging.put((buffer, None))
        self._readers = Workers(_THREADS, "qoff-train-up")
        self._writers = Workers(_THREADS, "qoff-train-down")

    def here(self, home: Home) -> Tensor | None:
        """None but for a home that is near, or one of nothing."""
        if home.near:
            return home.memory
        return None if home.nbytes else torch.empty(0, dtype=torch.uint8, device=self._up.device)

    def read(self, home: Home, into: Tensor) -> Arrival:
        """Start copying the first bytes of a home to the GPU."""
        self._homes.count(f"{home.what} to the GPU", into.nbytes)
        after = self._up.recycle(into, self._poison)
        if home.memory is None or self._up.pageable:  # which takes as long as the copy
            return Arrival(self._readers.submit(partial(self._bring, home, into, after)), self._up)
        copy = Future[Event]()
        copy.set_result(self._copied(home.memory, into, after))
        return Arrival(copy, self._up)

    def write(self, home: Home, source: Tensor, then: Callable[[], None]) -> Future[None]:
        """Start writing to a home; `then` is called when it has ended, well or not.

        The future is done after `then`, with all of it where it belongs.
        """
        self._homes.count(f"{home.what} from the GPU", source.nbytes)
        made, copy = self._down.recycle(source, poison=False), None
        if home.memory is not None and not self._up.pageable:
            copy = self._down.copy(source, home.memory[: source.nbytes], made, timed=False).ended

        def work() -> None:
            try:
                if copy is not None:
                    copy.synchronize()
                else:
                    self._take_away(home, source, made)
            finally:
                then()

        return self._writers.submit(work)

    def spoil(self, memory: Tensor) -> None:
        """Leave memory that may still be computed with: `read` poisons it, in the GPU's order."""

    def close(self) -> None:
        """Wait for what is under way and stop."""
        self._readers.close()
        self._writers.close()
        self._down.close()

    def _copied(self, memory: Tensor, into: Tensor, after: Event) -> Event:
        return self._up.copy(memory[: into.nbytes], into, after, timed=False).ended

    def _bring(self, home: Home, into: Tensor, after: Event) -> Event:
        if home.memory is not None:
            return self._copied(home.memory, into, after)
        ended = after
        try:
            for at in range(0, into.nbytes, self._piece):
                ended = self._bring_piece(home, at, into, after)
        except BaseException:
            ended.synchronize()  # the memory is given back, and others write there
            raise
        return ended

    def _bring_piece(self, home: Home, at: int, into: Tensor, after: Event) -> Event:
        buffer, used = self._staging.get()
        try:
            if used is not None:
                used.synchronize()
            piece = buffer[: into.nbytes - at]
            self._homes.read(replace(home, offset=home.offset + at), piece).result()
            used = self._copied(piece, into[at : at + len(piece)], after)
            return used
        finally:
            self._staging.put((buffer, used))

    def _take_away(self, home: Home, source: Tensor, made: Event) -> None:
        if home.memory is not None:
            to = home.memory[: source.nbytes]
            self._down.copy(source, to, made, timed=False).ended.synchronize()
            return
        for at in range(0, source.nbytes, self._piece):
            buffer, used = self._staging.get()
            try:
                if used is not None:
                    used.synchronize()
                piece = buffer[: source.nbytes - at]
                copy = self._down.copy(source[at : at + len(piece)], piece, made, timed=False)
                copy.ended.synchronize()
                place = replace(home, offset=home.offset + at)
                self._homes.write(place, piece, nothing).result()
            finally:
                self._staging.put((buffer, None))


def streams_of(device: torch.device) -> tuple[CopyStream, CopyStream] | None:
    """Streams for copies to a GPU and from it; None for the CPU."""
    return None if device.type == "cpu" else (CopyStream(device), CopyStream(device))


def device_for(name: torch.device | str) -> torch.device:
    """The device that computes a training: "cpu", or a GPU like "cuda".

    Raises ArgumentError for a GPU that is not there, and as `resolve_device`.
    """
    found = resolve_device(name)
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ArgumentError("there is no GPU that torch can use; train with device 'cpu'")
    return found
