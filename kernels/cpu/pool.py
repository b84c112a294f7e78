"""A pool of threads that run compiled jobs: microseconds from launch to finish, no Python in between.

A job is a compiled `void(pool, thread, threads, args)` that every thread runs at once; it shares
work out with `next_chunk` and orders its phases with `barrier`. Idle threads spin for about 50 microseconds, because a decoder launches
the next job within a few, and then sleep in the kernel.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import platform
import sys
import threading
from functools import cache

import numba
import torch
from numba import types

from . import simd
from .compiled import JOB, inner, job

_LINE = 128  # bytes between fields, so that no two share a cache line
_EPOCH, _FUNCTION, _ARGS, _DONE, _CHUNK, _ARRIVED, _GENERATION, _SLEEPERS, _STOP = (
    _LINE * i for i in range(9)
)
_STATE_BYTES = _LINE * 9
_SPINS = 2000
_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), 0) if sys.platform == "linux" else 0
_FUTEX_WAIT, _FUTEX_WAKE = 128, 129  # process-private

_i64 = types.int64
_syscall = types.ExternalFunction("syscall", _i64(_i64, _i64, _i64, _i64, _i64, _i64, _i64))
_sched_yield = types.ExternalFunction("sched_yield", types.int32())
_usleep = types.ExternalFunction("usleep", types.int32(types.int32))


@inner
def next_chunk(pool):
    """The next number of 0, 1, 2, ... that no thread has taken since the last barrier."""
    return simd.atomic_add(pool + _CHUNK, 1)


@inner
def barrier(pool, threads):
    """Wait until every thread of the job is here; what they wrote is then visible to all."""
    if threads == 1:
        simd.atomic_store(pool + _CHUNK, 0)
        return
    generation = simd.atomic_load(pool + _GENERATION)
    if simd.atomic_add(pool + _ARRIVED, 1) == threads - 1:
        simd.atomic_store(pool + _ARRIVED, 0)
        simd.atomic_store(pool + _CHUNK, 0)
        simd.atomic_add(pool + _GENERATION, 1)
    else:
        _spin_while(pool + _GENERATION, generation)


@inner
def _spin_while(address, value):
    spins = 0
    while simd.atomic_load(address) == value:
        spins += 1
        if spins > _SPINS:  # the thread waited for may need this core
            _sched_yield()
        else:
            simd.spin_pause()


@inner
def _sleep_while(address, value, sleepers):
    for _ in range(_SPINS):
        if simd.atomic_load(address) != value:
            return
        simd.spin_pause()
    simd.atomic_add(sleepers, 1)
    while simd.atomic_load(address) == value:
        if _FUTEX:
            _syscall(_FUTEX, address, _FUTEX_WAIT, value & 0xFFFFFFFF, 0, 0, 0)
        else:
            _usleep(50)
    simd.atomic_add(sleepers, -1)


@job
def _worker(pool, thread, threads, args):
    seen = 0
    while True:
        _sleep_while(pool + _EPOCH, seen, pool + _SLEEPERS)
        seen += 1
        if simd.atomic_load(pool + _STOP) != 0:
            return
        simd.call_job(
            simd.peek_i64(pool + _FUNCTION), pool, thread, threads, simd.peek_i64(pool + _ARGS)
        )
        simd.atomic_add(pool + _DONE, 1)


@inner
def _publish(pool):
    simd.atomic_add(pool + _EPOCH, 1)
    if _FUTEX and simd.atomic_load(pool + _SLEEPERS) > 0:
        _syscall(_FUTEX, pool + _EPOCH, _FUTEX_WAKE, 1 << 30, 0, 0, 0)


@numba.cfunc(types.void(_i64, _i64, _i64, _i64), nopython=True, cache=True, error_model="numpy")
def _launch(pool, threads, function, args):
    simd.atomic_store(pool + _FUNCTION, function)
    simd.atomic_store(pool + _ARGS, args)
    simd.atomic_store(pool + _DONE, 0)
    simd.atomic_store(pool + _CHUNK, 0)
    if threads > 1:
        _publish(pool)
    simd.call_job(function, pool, 0, threads, args)
    done = simd.atomic_load(pool + _DONE)
    while done != threads - 1:
        _spin_while(pool + _DONE, done)
        done = simd.atomic_load(pool + _DONE)


@job
def _stop(pool, thread, threads, args):
    simd.atomic_store(pool + _STOP, 1)
    _publish(pool)


_Native = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)


class Pool:
    """`threads` threads, the calling one among them, that run one compiled job at a time."""

    def __init__(self, threads: int) -> None:
        if threads < 1:
            raise ValueError(f"a pool needs at least 1 thread, not {threads}")
        self.threads = threads
        self.lock = threading.RLock()  # held from filling a job's arguments to its end
        self._workspace = torch.empty(0, dtype=torch.uint8)
        self._memory = (ctypes.c_byte * (_STATE_BYTES + _LINE))()
        self._state = -(-ctypes.addressof(self._memory) // _LINE) * _LINE
        self._native_launch = _Native(_launch.address)
        worker = _Native(_worker.address)
        self._workers = [
            threading.Thread(
                target=worker, args=(self._state, i, threads, 0), name=f"qoff-cpu-{i}", daemon=True
            )
            for i in range(1, threads)
        ]
        for thread in self._workers:
            thread.start()

    def run(self, function: int, args: int) -> None:
        """Run the job at address `function` on all threads, with `args`, and wait for it."""
        with self.lock:
            self._native_launch(self._state, self.threads, function, args)

    def workspace(self, nbytes: int) -> int:
        """Address of at least `nbytes` bytes of scratch, valid while `lock` is held."""
        if self._workspace.numel() < nbytes + _LINE:
            self._workspace = torch.empty(nbytes + _LINE, dtype=torch.uint8)
        return -(-self._workspace.data_ptr() // _LINE) * _LINE

    def close(self) -> None:
        """End the threads; the pool cannot be used afterwards."""
        with self.lock:
            _Native(_stop.address)(self._state, 0, 0, 0)
            for thread in self._workers:
                thread.join()
            self._workers = []


@cache
def default_pool() -> Pool:
    """The pool that the ops run on: as many threads as torch uses when it is first asked for."""
    pool = Pool(torch.get_num_threads())
    atexit.register(pool.close)
    return pool


# A forked child has the pool's memory but not its threads; it makes a pool of its own.
os.register_at_fork(after_in_child=default_pool.cache_clear)

__all__ = ["JOB", "Pool", "barrier", "default_pool", "inner", "job", "next_chunk"]
