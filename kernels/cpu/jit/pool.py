"""A pool of threads that run compiled jobs, microseconds from launch to finish, without Python.

What its threads do, and what a job is, is in `pool_threads`; here lists of jobs are made, launched,
recorded, and run while more are added.
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
from typing import NamedTuple, TypeAlias

from qoff.interrupts import HEARD_S
from qoff.kernels.processor import usable_threads
from qoff.process import only_here

from . import pool_threads
from .pool_threads import LINE, STATE_BYTES, STEP_BYTES

_FIRST_JOBS = 8  # of an open list, which are run before it is known how long they take
_OPEN_JOBS = 4096  # of an open list
_numbers = itertools.count()
_Native = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)


Arguments: TypeAlias = ctypes.Structure | ctypes.Array  # of a job; it is told their address
# Address of the function, its arguments, and what has to live as long as they are used.
Job: TypeAlias = tuple[int, bytes, object]
Call: TypeAlias = tuple[int, Arguments]  # of a job, whose arguments it may change


class Told(NamedTuple):
    """A job that was deferred, with its own copy of the arguments."""

    function: int
    args: Arguments
    keep: object


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
        self._ahead: list[Told] | None = None  # jobs of the open list, while deferring
        self._noted: list[Told] | None = None  # those deferred since `noting`
        self._outgrown: list[object] = []  # workspaces that these know the address of
        self._step, self._list = (ctypes.c_int64 * 2)(), (ctypes.c_int64 * 3)()
        self._open_steps, self._left = (ctypes.c_int64 * (2 * _OPEN_JOBS))(), ctypes.c_int64()
        self._memory = (ctypes.c_byte * (STATE_BYTES + LINE))()
        self._state = -(-ctypes.addressof(self._memory) // LINE) * LINE
        self._native_launch, self._native_append = map(
            _Native, (pool_threads.launch.address, pool_threads.append.address)
        )
        worker = _Native(pool_threads.worker.address)
        self._workers = [
            threading.Thread(
                target=worker, args=(self._state, i, threads, 0), name=f"qoff-cpu-{i}", daemon=True
            )
            for i in range(1, threads)
        ]
        try:
            for thread in self._workers:
                thread.start()
        except BaseException:  # the system has no more: those that began use memory of this pool
            self._workers = [thread for thread in self._workers if thread.ident is not None]
            self.close()
            raise

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
                    _Native(pool_threads.abandon.address)(self._state, 0, 0, 0)
                self._ahead = None
                self._outgrown.clear()

    def _defer(self, function: int, args: Arguments, keep: object) -> None:
        assert self._ahead is not None
        if len(self._ahead) == _OPEN_JOBS:
            self.catch_up()
        if not self._ahead:
            steps = ctypes.addressof(self._open_steps)
            _Native(pool_threads.open_list.address)(self._state, steps, _OPEN_JOBS, 0)
        told = Told(function, type(args).from_buffer_copy(args), keep)
        self._ahead.append(told)
        if self._noted is not None:
            self._noted.append(told)
        self._native_append(self._state, function, ctypes.addressof(told.args), 0)

    @contextmanager
    def noting(self) -> Iterator[list[Told]]:
        """Note the jobs that are deferred meanwhile; none, if somebody has to `catch_up`."""
        found: list[Told] = []
        self._noted = found
        try:
            yield found
        finally:
            self._noted = None

    def catch_up(self) -> None:
        """Have the jobs done that are deferred; Python hears signals every `HEARD_S` or so."""
        if self._noted is not None:
            self._noted.clear()
            self._noted = None
        count, join = _FIRST_JOBS, _Native(pool_threads.join.address)
        while self._ahead:
            start = perf_counter()
            join(self._state, self.threads, count, ctypes.addressof(self._left))
            count = _following(count, perf_counter() - start)
            if self._left.value == 0:
                self._ahead.clear()

    def run_all(self, jobs: JobList, times: int = 1, first: int = 0) -> None:
        """Run jobs one after another, without Python in between, and wait for them.

        All of them from the first on, so many times, unless one ends the list (`end_list`).
        """
        with self.lock:
            self.catch_up()
            self._launch(jobs.address + STEP_BYTES * first, len(jobs) - first, times)

    def run_list(self, steps: int, count: int) -> None:
        """Run jobs that lie in memory behind those that are deferred, heard as in `catch_up`."""
        with self.lock:
            self.catch_up()
            done, some = 0, min(count, _FIRST_JOBS)
            while done < count:
                start = perf_counter()
                self._launch(steps + STEP_BYTES * done, some, 1)
                done += some
                some = min(count - done, _following(some, perf_counter() - start))

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
            _Native(pool_threads.stop.address)(self._state, 0, 0, 0)
            for thread in self._workers:
                thread.join()
            self._workers = []


def room(nbytes: int) -> int:
    """Bytes that the arguments of a job take in a list of them: whole cache lines of 64."""
    return -(-nbytes // 64) * 64


def _following(count: int, seconds: float) -> int:
    """How many jobs to run before Python looks again, if so many took so long."""
    return max(1, min(4 * count, int(count * HEARD_S / seconds)))


class JobList:
    """Jobs with copies of their arguments, in memory as the threads read them."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._kept = [keep for *_, keep in jobs]
        starts = list(accumulate((room(len(args)) for _, args, _ in jobs), initial=0))
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

__all__ = ["JobList", "Pool", "default_pool"]
