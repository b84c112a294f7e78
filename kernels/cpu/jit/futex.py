"""Waiting for words in memory: compiled threads sleep until another one wakes them."""

from __future__ import annotations

import platform
import sys
import time

from llvmlite import ir
from numba import types
from numba.core import cgutils

from . import simd
from .compiled import inner
from .emit import I32, I64

_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), 0) if sys.platform == "linux" else 0
SLEEPS = _FUTEX != 0  # else those that wait look again and again
_WAIT, _WAKE = 128, 129  # process-private
_MONOTONIC = getattr(time, "CLOCK_MONOTONIC", 1)  # the clock of `time.perf_counter`
_SECOND = 1_000_000_000

_i64 = types.int64
_syscall = types.ExternalFunction("syscall", _i64(_i64, _i64, _i64, _i64, _i64, _i64, _i64))
_usleep = types.ExternalFunction("usleep", types.int32(types.int32))


@simd.vector_intrinsic(_i64)
def clock_ns(b):
    """What `time.perf_counter_ns` says."""
    pair = cgutils.alloca_once(b, ir.ArrayType(I64, 2))
    signature = ir.FunctionType(I32, [I32, I64.as_pointer()])
    function = cgutils.get_or_insert_function(b.module, signature, "clock_gettime")
    at = b.bitcast(pair, I64.as_pointer())
    b.call(function, [ir.Constant(I32, _MONOTONIC), at])
    seconds = b.mul(b.load(at), ir.Constant(I64, _SECOND))
    return b.add(seconds, b.load(b.gep(at, [ir.Constant(I32, 1)])))


@simd.vector_intrinsic(_i64, _i64)
def timespec(b, ns):
    """Address of a `struct timespec` on the stack of the calling function: so many nanoseconds."""
    pair = cgutils.alloca_once(b, ir.ArrayType(I64, 2))
    at = b.bitcast(pair, I64.as_pointer())
    b.store(b.sdiv(ns, ir.Constant(I64, _SECOND)), at)
    b.store(b.srem(ns, ir.Constant(I64, _SECOND)), b.gep(at, [ir.Constant(I32, 1)]))
    return b.ptrtoint(pair, I64)


@inner
def sleep(address, value):
    """Sleep until woken, unless another value is there; may return without a reason."""
    if _FUTEX:
        _syscall(_FUTEX, address, _WAIT, value & 0xFFFFFFFF, 0, 0, 0)
    else:
        _usleep(50)


@inner
def sleep_for(address, value, ns):
    """As `sleep`, for so many nanoseconds at most."""
    if _FUTEX:
        _syscall(_FUTEX, address, _WAIT, value & 0xFFFFFFFF, timespec(ns), 0, 0)
    else:
        _usleep(50)


@inner
def wake(address):
    """Wake all that sleep for a word."""
    if _FUTEX:
        _syscall(_FUTEX, address, _WAKE, 1 << 30, 0, 0, 0)


__all__ = ["SLEEPS", "clock_ns", "sleep", "sleep_for", "wake"]
