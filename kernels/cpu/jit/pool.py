"""A pool of threads that run compiled jobs, microseconds from launch to finish, without Python.

A job is a compiled `void(pool, thread, threads, args)`. It consists of up to four phases of
numbered items: `take` hands out each item once, `finish` reports it done, and `wait` lets a thread
go on to the next phase when all items are. Threads join a job as they come, and its end waits only
for those that did: a thread that the operating system has put aside costs its share of the work,
not everybody's time. Idle threads spin for some 50 microseconds, because a decoder launches
the next job within a few, and then sleep in the kernel.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import os
import platform
import sys
import threading
from functools import cache

import torch
from numba import types

from qoff.kernels.processor import usable_threads
from qoff.process import only_here

from . import simd
from .compiled import inner, job

_LINE = 128  # bytes between fields, so that no two share a cache line
_PHASES = 4
_EPOCH, _OPEN, _FUNCTION, _ARGS, _ACTIVE, _SLEEPERS, _STOP, _NEXT = (_LINE * i for i in range(8))
_DONE = _NEXT + _PHASES * _LINE
_STATE_BYTES = _DONE + _PHASES * _LINE
_SPINS = 2000
_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), 0) if sys.platform == "linux" else 0
_FUTEX_WAIT, _FUTEX_WAKE = 128, 129  # process-private

_i64 = types.int64
_syscall = types.ExternalFunction("syscall", _i64(_i64, _i64, _i64, _i64, _i64, _i64, _i64))
_sched_yield = types.ExternalFunction("sched_yield", types.int32())
_usleep = types.ExternalFunction("usleep", types.int32(types.int32))


@inner
def take(pool, phase):
    """The next item of a phase: 0, 1, 2, ...; numbers go on past the last item."""
    return simd.atomic_add(pool + _NEXT + phase * _LINE, 1)


@inner
def finish(pool, phase):
    """Report one item of a phase as done."""
    simd.atomic_add(pool + _DONE + phase * _LINE, 1)


@inner
def wait(pool, phase, items):
    """Wait until all `items` of a phase are done; what they wrote is then visible."""
    _spin_until(pool + _DONE + phase * _LINE, items)


@inner
def _spin_until(address, value):
    spins = 0
    while simd.atomic_load(address) != value:
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
        seen = simd.atomic_load(pool + _EPOCH)
        if simd.atomic_load(pool + _STOP) != 0:
            return
        # Counted in before looking: a job that is still open then cannot end without this thread.
        simd.atomic_add(pool + _ACTIVE, 1)
        if simd.atomic_load(pool + _OPEN) != 0:
            function, job_args = simd.peek_i64(pool + _FUNCTION), simd.peek_i64(pool + _ARGS)
            simd.call_job(function, pool, thread, threads, job_args)
        simd.atomic_add(pool + _ACTIVE, -1)


@inner
def _publish(pool):
    simd.atomic_add(pool + _EPOCH, 1)
    if _FUTEX and simd.atomic_load(pool + _SLEEPERS) > 0:
        _syscall(_FUTEX, pool + _EPOCH, _FUTEX_WAKE, 1 << 30, 0, 0, 0)


@job
def _launch(pool, threads, function, args):
    simd.atomic_store(pool + _FUNCTION, function)
    simd.atomic_store(pool + _ARGS, args)
    for phase in range(_PHASES):
        simd.atomic_store(pool + _NEXT + phase * _LINE, 0)
        simd.atomic_store(pool + _DONE + phase * _LINE, 0)
    simd.atomic_add(pool + _OPEN, 1)
    if threads > 1:
        _publish(pool)
    simd.call_job(function, pool, 0, threads, args)
    simd.atomic_add(pool + _OPEN, -1)
    _spin_until(pool + _ACTIVE, 0)


@job
def _stop(pool, thread, threads, args):
    simd.atomic_store(pool + _STOP, 1)
    _publish(pool)


_numbers = itertools.count()
_Native = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)


class Pool:
    """`threads` threads, the calling one among them, that run one compiled job at a time."""

    def __init__(self, threads: int) -> None:
        if threads < 1:
            raise ValueError(f"a pool needs at least 1 thread, not {threads}")
        self.threads = threads
        self.key = f"_arguments_of_pool_{next(_numbers)}"  # what ops keep for this pool
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
    """The pool that the ops run on; its threads are counted when it is first asked for."""
    pool = Pool(usable_threads())
    atexit.register(only_here(pool.close))
    return pool


# A forked child has the pool's memory but not its threads; it makes a pool of its own.
os.register_at_fork(after_in_child=default_pool.cache_clear)

__all__ = ["Pool", "default_pool", "finish", "take", "wait"]
