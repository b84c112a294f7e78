"""Short time slices for threads that mostly wait for disks, so that they run when they can."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from ctypes import c_int32, c_uint32, c_uint64

_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}.get(platform.machine(), 0)
_SLICE_NS = 100_000  # the least that Linux takes


class _Attributes(ctypes.Structure):
    """`struct sched_attr` of Linux."""

    _fields_ = (
        ("size", c_uint32), ("policy", c_uint32), ("flags", c_uint64), ("nice", c_int32),
        ("priority", c_uint32), ("runtime", c_uint64), ("deadline", c_uint64), ("period", c_uint64),
    )  # fmt: skip


def shorten_slices() -> None:
    """Ask for the shortest slices for this thread, which Linux takes from version 6.12 on.

    When it wakes it then runs before a thread in the middle of a long slice, one that computes; its
    share of the processor stays what it is. Nothing happens where that cannot be had.
    """
    if sys.platform != "linux" or not _SCHED_SETATTR:
        return
    if os.sched_getscheduler(0) != os.SCHED_OTHER:
        return
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    wanted = _Attributes(ctypes.sizeof(_Attributes), os.SCHED_OTHER, 0, nice, 0, _SLICE_NS, 0, 0)
    ctypes.CDLL(None).syscall(_SCHED_SETATTR, 0, ctypes.byref(wanted), 0)
