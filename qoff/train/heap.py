"""Memory that torch has freed and the C library keeps: given back to the system while it grows.

glibc serves tensors of up to 32 MiB from its heap once some have been freed. What a layer frees
lies between what stays, and what comes next does not fit everywhere: the heap grows to several
times of what is in use.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from qoff.system_memory import return_freed

_GROWS = 1.25  # over what is free after the first micro-batch of a unit
_SMALL = 16 << 20  # bytes that may always be free


class _Counts(ctypes.Structure):
    """`struct mallinfo2`."""

    _fields_ = [  # ctypes reads it
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


class Heap:
    """Of this process; other C libraries than glibc (2.33 or newer) are left alone."""

    def __init__(self) -> None:
        counts = getattr(ctypes.CDLL(None), "mallinfo2", None)
        if counts is not None:
            counts.restype = _Counts
        self._counts: Callable[[], _Counts] | None = counts
        self._free: int | None = None

    def next_unit(self) -> None:
        """Give back what is free."""
        if self._counts is not None:
            return_freed()
            self._free = None

    def next_batch(self) -> None:
        """Give back what is free, if that is more than after a unit's first micro-batch."""
        if self._counts is None:
            return
        free = int(self._counts().fordblks)
        if self._free is None:
            self._free = max(free, _SMALL)
        elif free > _GROWS * self._free:
            return_freed()
