"""Arena: the fixed memory of one tier, mapped once and handed out piece by piece."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable

import torch
from torch import Tensor

from qoff.errors import BudgetError

PAGE = 4096  # bytes: what direct reads are aligned to, in memory and in the file


def round_up(nbytes: int, align: int) -> int:
    """Return the smallest multiple of `align` that is at least `nbytes`."""
    return -(-nbytes // align) * align


def map_pages(nbytes: int) -> Tensor:
    """Return `nbytes` bytes of zeroed private anonymous memory as uint8, aligned to a page.

    Pages take up memory when they are first written; the whole is given back when the last tensor
    over it dies. Raises OSError when the address space or the limit of locked memory is exhausted.
    """
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a hint; kernels built without huge pages refuse it
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)  # keeps `pages` alive


class Arena:
    """Memory of one tier, of a size fixed at the start; pieces of it are never given back singly.

    `tier` names it in errors ("device", "host"). `allocate` returns the whole as one uint8 tensor
    and is called once. Raises BudgetError when that memory cannot be had.
    """

    def __init__(
        self, tier: str, nbytes: int, allocate: Callable[[int], Tensor] = map_pages
    ) -> None:
        self.tier = tier
        self.capacity = nbytes
        self.used = 0
        self.peak = 0  # the largest `used` ever, kept after close()
        try:
            self._memory: Tensor | None = allocate(nbytes)
        except OSError as error:
            raise BudgetError(
                f"{tier} memory: the system refused {nbytes:,} bytes ({error.strerror}); "
                "use a smaller budget"
            ) from error

    def alloc(self, nbytes: int, name: str, align: int = PAGE) -> Tensor:
        """Return `nbytes` bytes as uint8, at a multiple of `align` bytes from the start.

        Raises BudgetError, naming `name`, when less than that is left.
        """
        if self._memory is None:
            raise ValueError(f"the {self.tier} arena is closed")
        start = round_up(self.used, align)
        if start + nbytes > self.capacity:
            raise BudgetError(
                f"{self.tier} memory: {name} needs {nbytes:,} bytes, "
                f"{max(self.capacity - start, 0):,} of {self.capacity:,} are left"
            )
        self.used = start + nbytes
        self.peak = max(self.peak, self.used)
        return self._memory[start : self.used]

    def close(self) -> None:
        """Let go of the memory; it returns to the system when no tensor over it is left."""
        self._memory = None
        self.used = 0
