"""Arena: the fixed memory of one tier, mapped once and handed out piece by piece."""

from __future__ import annotations

import contextlib
import mmap
import resource
import warnings
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from qoff.errors import BudgetError
from qoff.system_memory import space_limit
from qoff.units import format_size

from .io.copy_stream import CopyStream

PAGE = 4096  # bytes: what direct reads are aligned to, in memory and in the file
HUGE_PAGE = 2 << 20


def round_up(nbytes: int, align: int) -> int:
    """Return the smallest multiple of `align` that is at least `nbytes`."""
    return -(-nbytes // align) * align


def map_pages(nbytes: int) -> Tensor:
    """Return `nbytes` bytes of zeroed private anonymous memory as uint8, aligned to a huge page.

    Disks read at two thirds of their rate into small pages that lie scattered, and huge ones are
    had where all of one is mapped. Pages take up memory when they are first written; the whole is
    given back when the last tensor over it dies. Raises OSError when the address space or the limit
    of locked memory is exhausted.
    """
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    room = HUGE_PAGE if nbytes >= HUGE_PAGE else 0
    pages = mmap.mmap(-1, nbytes + room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = torch.frombuffer(pages, dtype=torch.uint8)  # keeps `pages` alive
    start = -memory.data_ptr() % HUGE_PAGE if room else 0
    used = round_up(nbytes, PAGE)
    with contextlib.suppress(OSError):  # hints; kernels built without huge pages refuse them
        pages.madvise(mmap.MADV_HUGEPAGE, start, used)
        if start + used < len(pages):  # else the last huge page might be more than was asked for
            pages.madvise(mmap.MADV_NOHUGEPAGE, start + used)
    return memory[start : start + nbytes]


class Arena:
    """Memory of one tier, of a size fixed at the start; pieces of it are never given back singly.

    `tier` names it in errors ("device", "host"). `allocate` returns the whole as one uint8 tensor
    and is called once. mapped: whether it is in this process's address space, whose limit errors
    then name. Raises BudgetError when that memory cannot be had.
    """

    def __init__(
        self,
        tier: str,
        nbytes: int,
        allocate: Callable[[int], Tensor] = map_pages,
        mapped: bool = True,
    ) -> None:
        self.tier = tier
        self.capacity = nbytes
        self.used = 0  # kept after close()
        try:
            with torch.inference_mode(False):  # else other threads could not write to it
                self._memory: Tensor | None = allocate(nbytes)
        except (OSError, OverflowError) as error:
            limit = space_limit() if mapped else None
            advice = "use" if limit is None else f"{limit}; raise that limit, or use"
            raise BudgetError(
                f"{tier} memory: the system refused {nbytes:,} bytes ({error}); {advice} a smaller "
                "budget"
            ) from error

    def alloc(self, nbytes: int, name: str) -> Tensor:
        """Return `nbytes` bytes as uint8, aligned to a page.

        Raises BudgetError, naming `name`, when less than that is left.
        """
        if self._memory is None:
            raise ValueError(f"the {self.tier} arena is closed")
        start = round_up(self.used, PAGE)
        if start + nbytes > self.capacity:
            raise BudgetError(
                f"{self.tier} memory: {name} needs {nbytes:,} bytes, "
                f"{max(self.capacity - start, 0):,} of {self.capacity:,} are left"
            )
        self.used = start + nbytes
        return self._memory[start : self.used]

    def close(self) -> None:
        """Let go of the memory; it returns to the system when no tensor over it is left."""
        self._memory = None


class TierArenas:
    """Arenas "device" and "host" of `nbytes`, by tier.

    stream: of a GPU, closed with this; then host memory is locked, so that it can be copied from
    and to while the GPU computes, or else a warning says what the system refused. None: the device
    is the CPU, whose memory is both. pages: where host memory comes from. Raises
    BudgetError for memory that cannot be had.
    """

    def __init__(
        self,
        nbytes: Mapping[str, int],
        stream: CopyStream | None = None,
        pages: Callable[[int], Tensor] = map_pages,
    ) -> None:
        self._stream, self._pages = stream, pages
        self._locked: Tensor | None = None
        allocate = pages if stream is None else stream.allocate
        self.arenas = {"device": Arena("device", nbytes["device"], allocate, stream is None)}
        self.arenas["host"] = Arena("host", nbytes["host"], self._host_memory)

    def close(self) -> None:
        """Wait until a GPU uses neither any more and let go of them; may be repeated."""
        stream, locked = self._stream, self._locked
        self._stream = self._locked = None
        with contextlib.ExitStack() as all_of_it:
            for arena in self.arenas.values():
                all_of_it.callback(arena.close)
            if stream is not None and locked is not None:
                all_of_it.callback(stream.unpin, locked)
            if stream is not None:
                stream.close()

    def _host_memory(self, nbytes: int) -> Tensor:
        memory = self._pages(nbytes)
        if self._stream is None or not nbytes:
            return memory
        try:
            self._stream.pin(memory)
        except OSError as refused:
            return self._pinned_by_the_driver(memory, self._stream, refused)
        self._locked = memory
        return memory

    @staticmethod
    def _pinned_by_the_driver(memory: Tensor, stream: CopyStream, refused: OSError) -> Tensor:
        """Other memory, pinned; or `memory` as it is, which copies then go through unpinned."""
        try:
            return stream.allocate_pinned(memory.nbytes)
        except OSError as error:
            stream.pageable = True
            limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
            allowed = "unlimited" if limit == resource.RLIM_INFINITY else format_size(limit)
            warnings.warn(
                f"{format_size(memory.nbytes)} of host memory cannot be pinned "
                f"({refused.strerror}; {error.strerror}), so that copies to the GPU are slower; "
                f"the limit of locked memory (RLIMIT_MEMLOCK, `ulimit -l`) is {allowed}",
                stacklevel=2,
            )
            return memory
