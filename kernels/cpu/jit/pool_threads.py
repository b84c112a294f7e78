"""What the threads of a pool do, and how they tell each other: compiled, over one block of memory.

A job is a compiled `void(pool, thread, threads, args)`. It consists of up to four phases of
numbered items: `take` hands out each item once, `finish` reports it done, and `wait` lets a thread
go on to the next phase when all items are. A launch is a list of jobs, one after another. Threads
join a job as they come, and the next begins when those that did have left it: a thread that the
operating system has put aside costs its share of the work, not everybody's time. Idle threads spin
for some 50 microseconds, because a decoder launches the next list within a few, and then sleep in
the kernel. A list may be open: the other threads run its jobs while the caller adds more.
"""

from __future__ import annotations

from numba import types

from . import futex, simd
from .compiled import inner, job

LINE = 128  # bytes between fields, so that no two share a cache line
_PHASES = 4
_EPOCH, _AT, _STEPS, _COUNT, _FIRST, END, _SLEEPERS, _STOP, _NEXT = (LINE * i for i in range(9))
_DONE = _NEXT + _PHASES * LINE
STATE_BYTES = _DONE + _PHASES * LINE
_SPINS = 2000
_sched_yield = types.ExternalFunction("sched_yield", types.int32())


@inner
def take(pool, phase):
    """The next item of a phase: 0, 1, 2, ...; numbers go on past the last item."""
    return simd.atomic_add(pool + _NEXT + phase * LINE, 1)


@inner
def finish(pool, phase):
    """Report one item of a phase as done."""
    simd.atomic_add(pool + _DONE + phase * LINE, 1)


@inner
def wait(pool, phase, items):
    """Wait until all `items` of a phase are done; what they wrote is then visible."""
    _spin_until(pool + _DONE + phase * LINE, items)


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
STEP_BYTES = 16  # of a list: address of the function and of its arguments


@inner
def _enter(pool, last):
    """Join the job at work, once `last` is over: its number; -1 where there is none."""
    spins = 0
    while True:
        at = simd.atomic_load(pool + _AT)
        number = at >> _NUMBER
        if number >= simd.atomic_load(pool + END):
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
                simd.poke_i64(pool + _NEXT + phase * LINE, 0)
                simd.poke_i64(pool + _DONE + phase * LINE, 0)
            simd.atomic_store(pool + _AT, ((at >> _NUMBER) + 1) << _NUMBER)
            return


@inner
def end_list(pool):
    """End the list with the job at work, which calls this."""
    simd.atomic_store(pool + END, (simd.atomic_load(pool + _AT) >> _NUMBER) + 1)


@inner
def place(pool):
    """Where in its list the job at work is, which calls this: 0, 1, ..."""
    number = simd.atomic_load(pool + _AT) >> _NUMBER
    return (number - simd.peek_i64(pool + _FIRST)) % simd.peek_i64(pool + _COUNT)


@inner
def _take_part(pool, number, thread, threads):
    """Do what is left of a job that this thread is in, while which the list stays what it is."""
    at = (number - simd.peek_i64(pool + _FIRST)) % simd.peek_i64(pool + _COUNT)
    step = simd.peek_i64(pool + _STEPS) + STEP_BYTES * at
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
def worker(pool, thread, threads, args):
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
def launch(pool, threads, jobs, _):
    """Run a list: where it is, how many jobs, how many times. The caller is one of the threads."""
    first, count = simd.atomic_load(pool + _AT) >> _NUMBER, simd.peek_i64(jobs + 8)
    simd.poke_i64(pool + _STEPS, simd.peek_i64(jobs))
    simd.poke_i64(pool + _COUNT, count)
    simd.poke_i64(pool + _FIRST, first)
    simd.atomic_add(pool + END, count * simd.peek_i64(jobs + 16))
    if threads > 1:
        _publish(pool)
    _work(pool, 0, threads)


@job
def open_list(pool, steps, count, _):
    """Begin a list of no jobs, with memory for `count`."""
    simd.poke_i64(pool + _STEPS, steps)
    simd.poke_i64(pool + _COUNT, count)
    simd.poke_i64(pool + _FIRST, simd.atomic_load(pool + _AT) >> _NUMBER)


@job
def append(pool, function, args, _):
    """Add a job to the open list, for the other threads to begin."""
    end = simd.atomic_load(pool + END)
    step = simd.peek_i64(pool + _STEPS) + STEP_BYTES * (end - simd.peek_i64(pool + _FIRST))
    simd.poke_i64(step, function)
    simd.poke_i64(step + 8, args)
    simd.atomic_add(pool + END, 1)
    _publish(pool)


@job
def join(pool, threads, jobs, left):
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
    simd.poke_i64(left, simd.atomic_load(pool + END) - number)


@job
def abandon(pool, _, __, ___):
    """End the open list after the jobs that threads are in, and wait for these."""
    simd.atomic_store(pool + END, 0)
    while True:
        at = simd.atomic_load(pool + _AT)
        following = (at >> _NUMBER) + 1
        # Who saw the list before it ended can no longer join.
        if at & (2 * _LEAVING - 1) == 0 and simd.compare_and_swap(
            pool + _AT, at, following << _NUMBER
        ):
            simd.atomic_store(pool + END, following)
            return
        _sched_yield()


@job
def stop(pool, thread, threads, args):
    simd.atomic_store(pool + _STOP, 1)
    _publish(pool)
