"""A pool of threads that run compiled jobs, microseconds from launch to finish, without Python.

A job is a compiled `void(pool, thread, threads, args)`. It consists of up to four phases of
numbered items: `take` hands out each item once, `finish` reports it done, and `wait` lets a thread
go on to the next phase when all items are. A launch is a list of jobs, one after another. Threads
join a job as they come, and the next begins when those that did have left it: a thread that the
operating system has put aside costs its share of the work, not everybody's time. Idle threads spin
for some 50 microseconds, because a decoder launches the next list within a few, and then sleep in
the kernel. A list may be open: the other threads run its jobs while the caller adds more.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import cache
from itertools import accumulate
from time import perf_counter
from typing import TypeAlias

from numba import types

from qoff.interrupts import HEARD_S
from qoff.kernels.processor import usable_threads
from qoff.process import only_here

from . import futex, simd
from .compiled import inner, job

_LINE = 128  # bytes between fields, so that no two share a cache line
_PHASES = 4
_EPOCH, _AT, _STEPS, _COUNT, _FIRST, _END, _SLEEPERS, _STOP, _NEXT = (_LINE * i for i in range(9))
_DONE = _NEXT + _PHASES * _LINE
_STATE_BYTES = _DONE + _PHASES * _LINE
_SPINS = 2000
_FIRST_JOBS = 8  # of an open list, which are run before it is known how long they take
_OPEN_JOBS = 4096  # of an open list
_sched_yield = types.ExternalFunction("sched_yield", types.int32())


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
        futex.sleep(address, value)
    simd.atomic_add(sleepers, -1)


# `_AT` says all of the job at work at once: its number among all jobs so far, whether it is being
# left for good, and how many threads are in it. tests/kernels/test_pool_protocol.py follows what is
# done with it step by step.
_LEAVING, _NUMBER = 1 << 15, 16  # a bit, and where the number begins
_STEP_BYTES = 16  # of a list: address of the function and of its arguments


@inner
def _enter(pool, last):
    """Join the job at work, once `last` is over: its number; -1 where there is none."""
    spins = 0
    while True:
        at = simd.atomic_load(pool + _AT)
        number = at >> _NUMBER
        if number >= simd.atomic_load(pool + _END):
            return -1
        there = number != last and at & _LEAVING == 0
        if there and simd.compare_and_swap(pool + _AT, at, at + 1) != 0:
            return number
        spins += 1
        if spins > _SPINS:  # a thread in the job may need this core
            _sched_yield()
        else:
            simd.spin_pause()


@inner
def _leave(pool):
    """Leave a job whose items are all taken; the last to leave makes way for the next job."""
    while True:
        at = simd.atomic_load(pool + _AT)
        if at & (_LEAVING - 1) > 1:
            if simd.compare_and_swap(pool + _AT, at, at - 1) != 0:
                return
        elif simd.compare_and_swap(pool + _AT, at, at | _LEAVING) != 0:
            for phase in range(_PHASES):
                simd.poke_i64(pool + _NEXT + phase * _LINE, 0)
                simd.poke_i64(pool + _DONE + phase * _LINE, 0)
            simd.atomic_store(pool + _AT, ((at >> _NUMBER) + 1) << _NUMBER)
            return


@inner
def end_list(pool):
    """End the list with the job at work, which calls this."""
    simd.atomic_store(pool + _END, (simd.atomic_load(pool + _AT) >> _NUMBER) + 1)


@inner
def place(pool):
    """Where in its list the job at work is, which calls this: 0, 1, ..."""
    number = simd.atomic_load(pool + _AT) >> _NUMBER
    return (number - simd.peek_i64(pool + _FIRST)) % simd.peek_i64(pool + _COUNT)


@inner
def _take_part(pool, number, thread, threads):
    """Do what is left of a job that this thread is in, while which the list stays what it is."""
    at = (number - simd.peek_i64(pool + _FIRST)) % simd.peek_i64(pool + _COUNT)
    step = simd.peek_i64(pool + _STEPS) + _STEP_BYTES * at
    simd.call_job(simd.peek_i64(step), pool, thread, threads, simd.peek_i64(step + 8))
    _leave(pool)


@inner
def _work(pool, thread, threads):
    """Take part in the jobs of the list until all are done."""
    number = _enter(pool, -1)
    while number >= 0:
        _take_part(pool, number, thread, threads)
        number = _enter(pool, number)


@job
def _worker(pool, thread, threads, args):
    seen = 0
    while True:
        _sleep_while(pool + _EPOCH, seen, pool + _SLEEPERS)
        seen = simd.atomic_load(pool + _EPOCH)
        if simd.atomic_load(pool + _STOP) != 0:
            return
        _work(pool, thread, threads)


@inner
def _publish(pool):
    simd.atomic_add(pool + _EPOCH, 1)
    if simd.atomic_load(pool + _SLEEPERS) > 0:
        futex.wake(pool + _EPOCH)


@job
def _launch(pool, threads, jobs, _):
    """Run a list: where it is, how many jobs, how many times. The caller is one of the threads."""
    first, count = simd.atomic_load(pool + _AT) >> _NUMBER, simd.peek_i64(jobs + 8)
    simd.poke_i64(pool + _STEPS, simd.peek_i64(jobs))
    simd.poke_i64(pool + _COUNT, count)
    simd.poke_i64(pool + _FIRST, first)
    simd.atomic_add(pool + _END, count * simd.peek_i64(jobs + 16))
    if threads > 1:
        _publish(pool)
    _work(pool, 0, threads)


@job
def _open(pool, steps, count, _):
    """Begin a list of no jobs, with memory for `count`."""
    simd.poke_i64(pool + _STEPS, steps)
    simd.poke_i64(pool + _COUNT, count)
    simd.poke_i64(pool + _FIRST, simd.atomic_load(pool + _AT) >> _NUMBER)


@job
def _append(pool, function, args, _):
    """Add a job to the open list, for the other threads to begin."""
    end = simd.atomic_load(pool + _END)
    step = simd.peek_i64(pool + _STEPS) + _STEP_BYTES * (end - simd.peek_i64(pool + _FIRST))
    simd.poke_i64(step, function)
    simd.poke_i64(step + 8, args)
    simd.atomic_add(pool + _END, 1)
    _publish(pool)


@job
def _join(pool, threads, jobs, left):
    """Take part in the open list for so many jobs, or to its end; how many are `left` then."""
    number = simd.atomic_load(pool + _AT) >> _NUMBER
    until, last = number + jobs, -1
    while number < until:
        number = _enter(pool, last)
        if number < 0:
            break
        _take_part(pool, number, 0, threads)
        last = number
    number = simd.atomic_load(pool + _AT) >> _NUMBER
    simd.poke_i64(left, simd.atomic_load(pool + _END) - number)


@job
def _abandon(pool, _, __, ___):
    """End the open list after the jobs that threads are in, and wait for these."""
    simd.atomic_store(pool + _END, 0)
    while True:
        at = simd.atomic_load(pool + _AT)
        following = (at >> _NUMBER) + 1
        # Who saw the list before it ended can no longer join.
        if at & (2 * _LEAVING - 1) == 0 and simd.compare_and_swap(
            pool + _AT, at, following << _NUMBER
        ):
            simd.atomic_store(pool + _END, following)
            return
        _sched_yield()


@job
def _stop(pool, thread, threads, args):
    simd.atomic_store(pool + _STOP, 1)
    _publish(pool)


_numbers = itertools.count()
_Native = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)


Arguments: TypeAlias = ctypes.Structure | ctypes.Array  # of a job; it is told their address
# Address of the function, its arguments, and what has to live as long as they are used.
Job: TypeAlias = tuple[int, bytes, object]
Call: TypeAlias = tuple[int, Arguments]  # of a job, whose arguments it may change


class Pool:
    """`threads` threads, the calling one among them, that run one compiled job at a time."""

    def __init__(self, threads: int) -> None:
        if threads < 1:
            raise ValueError(f"a pool needs at least 1 thread, not {threads}")
        self.threads = threads
        self.key = f"_arguments_of_pool_{next(_numbers)}"  # what ops keep for this pool
        self.lock = threading.RLock()  # held from filling a job's arguments to its end
        self._workspace: ctypes.Array[ctypes.c_char] = (ctypes.c_char * 0)()
        self.moves = 0  # how often the workspace came to lie elsewhere
        self._recorded: list[Job] | None = None  # what is run is noted here
        self._ahead: list[object] | None = None  # what jobs of the open list need, while deferring
        self._outgrown: list[object] = []  # workspaces that these know the address of
        self._step, self._list = (ctypes.c_int64 * 2)(), (ctypes.c_int64 * 3)()
        self._open_steps, self._left = (ctypes.c_int64 * (2 * _OPEN_JOBS))(), ctypes.c_int64()
        self._memory = (ctypes.c_byte * (_STATE_BYTES + _LINE))()
        self._state = -(-ctypes.addressof(self._memory) // _LINE) * _LINE
        self._native_launch, self._native_append = map(_Native, (_launch.address, _append.address))
        worker = _Native(_worker.address)
        self._workers = [
            threading.Thread(
                target=worker, args=(self._state, i, threads, 0), name=f"qoff-cpu-{i}", daemon=True
            )
            for i in range(1, threads)
        ]
        for thread in self._workers:
            thread.start()

    def run(self, function: int, args: Arguments, keep: object = None) -> None:
        """Run the job at address `function` on all threads, with `args`, and wait for it.

        keep: memory that `args` have the address of, if it is not a tensor's.
        """
        with self.lock:
            if self._ahead is not None:
                self._defer(function, args, keep)
                return
            if self._recorded is not None:
                self._recorded.append((function, bytes(args), keep))
            self._step[:] = [function, ctypes.addressof(args)]
            self._launch(ctypes.addressof(self._step), 1, 1)

    def _launch(self, steps: int, count: int, times: int) -> None:
        self._list[:] = [steps, count, times]
        self._native_launch(self._state, self.threads, ctypes.addressof(self._list), 0)

    @contextmanager
    def recording(self) -> Iterator[list[Job]]:
        """Note the jobs that are run meanwhile, by this thread; others wait."""
        with self.lock:
            assert self._recorded is None
            found: list[Job] = []
            self._recorded = found
            try:
                yield found
            finally:
                self._recorded = None

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """Only begin the jobs that this thread runs meanwhile, and have all done at the end.

        The other threads run them in order while this one is still at what comes after. Whoever
        reads before the end what a job writes has to `catch_up` first. Not within another.
        """
        with self.lock:
            assert self._recorded is None
            assert self._ahead is None
            self._ahead = []
            try:
                yield
                self.catch_up()
            finally:
                if self._ahead:
                    _Native(_abandon.address)(self._state, 0, 0, 0)
                self._ahead = None
                self._outgrown.clear()

    def _defer(self, function: int, args: Arguments, keep: object) -> None:
        assert self._ahead is not None
        if len(self._ahead) == _OPEN_JOBS:
            self.catch_up()
        if not self._ahead:
            steps = ctypes.addressof(self._open_steps)
            _Native(_open.address)(self._state, steps, _OPEN_JOBS, 0)
        args = type(args).from_buffer_copy(args)
        self._ahead.append((args, keep))
        self._native_append(self._state, function, ctypes.addressof(args), 0)

    def catch_up(self) -> None:
        """Have the jobs done that are deferred; Python hears signals every `HEARD_S` or so."""
        count, join = _FIRST_JOBS, _Native(_join.address)
        while self._ahead:
            start = perf_counter()
            join(self._state, self.threads, count, ctypes.addressof(self._left))
            count = max(1, min(4 * count, int(count * HEARD_S / (perf_counter() - start))))
            if self._left.value == 0:
                self._ahead.clear()

    def run_all(self, jobs: JobList, times: int = 1, first: int = 0) -> None:
        """Run jobs one after another, without Python in between, and wait for them.

        All of them from the first on, so many times, unless one ends the list (`end_list`).
        """
        with self.lock:
            self.catch_up()
            self._launch(jobs.address + _STEP_BYTES * first, len(jobs) - first, times)

    def workspace(self, nbytes: int) -> int:
        """Address of at least `nbytes` bytes of scratch, valid while `lock` is held."""
        if len(self._workspace) < nbytes:
            pages = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if self._ahead is not None:
                self._outgrown.append(self._workspace)
            self._workspace = (ctypes.c_char * nbytes).from_buffer(pages)
            self.moves += 1
        return ctypes.addressof(self._workspace)

    def shrink(self) -> None:
        """Give the scratch back; whoever wants some later gets other memory.

        Not within an op of this thread, which the garbage collector may have interrupted.
        """
        if self.lock._is_owned():  # type: ignore[attr-defined]
            return
        with self.lock:
            self._workspace = (ctypes.c_char * 0)()
            self.moves += 1

    def close(self) -> None:
        """End the threads; the pool cannot be used afterwards."""
        with self.lock:
            _Native(_stop.address)(self._state, 0, 0, 0)
            for thread in self._workers:
                thread.join()
            self._workers = []


class JobList:
    """Jobs with copies of their arguments, in memory as the threads read them."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._kept = [keep for *_, keep in jobs]
        starts = list(accumulate((-(-len(args) // 64) * 64 for _, args, _ in jobs), initial=0))
        self._arguments = (ctypes.c_byte * (starts[-1] + 1))()
        here = ctypes.addressof(self._arguments)
        self._steps = (ctypes.c_int64 * (2 * len(jobs)))()
        self.address = ctypes.addressof(self._steps)
        for i, ((function, args, _), start) in enumerate(zip(jobs, starts, strict=False)):
            ctypes.memmove(here + start, args, len(args))
            self._steps[2 * i : 2 * i + 2] = [function, here + start]

    def between(self, before: Sequence[Call], after: Sequence[Call]) -> JobList:
        """These jobs between others, which read their arguments where they are."""
        same = copy(self)
        first, last = (
            [number for job, args in some for number in (job, ctypes.addressof(args))]
            for some in (before, after)
        )
        numbers = [*first, *self._steps, *last]
        same._kept = [*self._kept, *before, *after]
        same._steps = (ctypes.c_int64 * len(numbers))(*numbers)
        same.address = ctypes.addressof(same._steps)
        return same

    def __len__(self) -> int:
        return len(self._steps) // 2


@cache
def default_pool() -> Pool:
    """The pool that the ops run on; its threads are counted when it is first asked for."""
    pool = Pool(usable_threads())
    atexit.register(only_here(pool.close))
    return pool


# A forked child has the pool's memory but not its threads; it makes a pool of its own.
os.register_at_fork(after_in_child=default_pool.cache_clear)

__all__ = ["JobList", "Pool", "default_pool", "end_list", "finish", "place", "take", "wait"]
