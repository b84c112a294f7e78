"""CopyStream: what transfers to a GPU ask of CUDA; copies in order, beside the computation."""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .pinned import pinned_memory

# Held while work is recorded as a CUDA graph: to wait for a whole GPU meanwhile, in any thread, is
# an error of CUDA, and may end the recording.
RECORDING = threading.RLock()


class Event(Protocol):
    """A point in the work of a device."""

    def synchronize(self) -> None:
        """Block until that point is reached."""


@dataclass(frozen=True)
class Copy:
    """A copy on its way."""

    ended: Event
    started: Event | None = None  # only if asked for


class CopyStream:
    """A CUDA stream for copies from pinned memory, and the memory on both of its ends.

    "The current stream" is that of the calling thread; computations are on it. Methods may be
    called from many threads. Initializes CUDA. pageable: whether host memory is not pinned, so that
    `copy` blocks until it was read.
    """

    pageable = False

    def __init__(self, device: torch.device) -> None:
        self.device = torch.empty(0, device=device).device  # with its index
        self._stream = torch.cuda.Stream(self.device)
        self._lock = threading.Lock()  # what belongs to one copy is not mixed with another

    def allocate(self, nbytes: int) -> Tensor:
        """Memory on the device, uint8. Raises OSError when there is not enough."""
        try:
            memory = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        except torch.OutOfMemoryError as error:
            raise OSError(errno.ENOMEM, "out of memory on the GPU") from error
        self._stream.wait_stream(torch.cuda.current_stream(self.device))  # its earlier owners
        return memory

    def pin(self, memory: Tensor) -> None:
        """Lock host memory for copies, as it is: torch would allocate the next power of two.

        Raises OSError when the driver refuses.
        """
        with torch.cuda.device(self.device):
            code = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
            if code:  # the next launch, whatever it is, would raise it once more
                with contextlib.suppress(RuntimeError):
                    torch.ones(1, device=self.device)
        if code:
            raise OSError(errno.ENOMEM, f"cudaHostRegister gave error {code}")

    def allocate_pinned(self, nbytes: int) -> Tensor:
        """Host memory that the driver pins, uint8. Raises OSError when it refuses."""
        with torch.cuda.device(self.device):
            return pinned_memory(nbytes)

    def unpin(self, memory: Tensor) -> None:
        """Undo `pin`; no copy from `memory` may be under way."""
        with torch.cuda.device(self.device):
            torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())

    def copy(self, source: Tensor, memory: Tensor, after: Event | None, timed: bool) -> Copy:
        """Enqueue one copy between host and device memory, behind `after`."""
        with self._lock, torch.cuda.stream(self._stream):
            if after is not None:
                assert isinstance(after, torch.cuda.Event)
                self._stream.wait_event(after)
            started = self._mark(self._stream) if timed else None
            memory.copy_(source, non_blocking=True)
            return Copy(self._mark(self._stream), started)

    def follow(self, event: Event) -> None:
        """Have later copies wait for a point, of another stream perhaps. Does not block."""
        assert isinstance(event, torch.cuda.Event)
        with self._lock:
            self._stream.wait_event(event)

    def run(self, work: Callable[[], None]) -> Event:
        """Enqueue work on the device behind all copies; where it ends."""
        with self._lock, torch.cuda.stream(self._stream):
            work()
            return self._mark(self._stream)

    def recycle(self, memory: Tensor, poison: bool) -> Event:
        """The point on the current stream up to which `memory` is used."""
        with torch.cuda.device(self.device):
            if poison:
                memory.fill_(0xFF)
            return self._mark(torch.cuda.current_stream(self.device))

    def order_after(self, event: Event) -> None:
        """Have the current stream wait for a point. Does not block."""
        assert isinstance(event, torch.cuda.Event)
        torch.cuda.current_stream(self.device).wait_event(event)

    def close(self) -> None:
        """Wait until no memory is copied or computed on any more."""
        with RECORDING:
            torch.cuda.synchronize(self.device)

    @staticmethod
    def _mark(stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event(blocking=True)  # who waits for it sleeps
        event.record(stream)
        return event
