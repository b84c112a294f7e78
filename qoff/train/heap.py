"""Memory that torch has freed and the C library keeps: given back to the system while it grows.

glibc serves tensors of up to 32 MiB from its heap once some have been freed. What a layer frees
lies between what stays, and what comes next does not fit everywhere: the heap grows to several
times of what is in use.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

from qoff.system_memory import return_freed

_GROWS = 1.25  # over what is free after the first micro-batch of a unit
_SMALL = 16 << 20  # bytes that may always be free
_COUNTS = (  # of glibc's `struct mallinfo2`, in its order
    *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
    *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
)


class Heap:
    """Of this process; `next_batch` needs glibc 2.33 or newer."""

    def __init__(self) -> None:
        self._free: int | None = None

    def next_unit(self) -> None:
        """Give back what is free."""
        return_freed()
        self._free = None

    def next_batch(self) -> None:
        """Give back what is free, if that is more than after a unit's first micro-batch."""
        free = _bytes_free()
        if self._free is None:
            self._free = max(free, _SMALL)
        elif free > _GROWS * self._free:
            return_freed()


def _bytes_free() -> int:
    """What the heap keeps; 0 where that is not known."""
    counts = _mallinfo2()
    return 0 if counts is None else int(counts().fordblks)


class _Counts(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in _COUNTS]


@cache
def _mallinfo2() -> Callable[[], _Counts] | None:
    try:
        found = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError, TypeError):  # TypeError: Windows has no CDLL(None)
        return None
    found.restype = _Counts
    return found
