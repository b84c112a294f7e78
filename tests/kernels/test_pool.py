"""Jobs run on every thread exactly once, phases hold, threads go away."""

from __future__ import annotations

import ctypes
import os
import threading
from time import monotonic
from typing import Any

import pytest
import torch

from qoff.kernels.cpu.jit import simd
from qoff.kernels.cpu.jit.compiled import job
from qoff.kernels.cpu.jit.pool import JobList, Pool, default_pool
from qoff.kernels.cpu.jit.pool_threads import END, end_list, finish, take, wait
from qoff.kernels.processor import usable_threads
from qoff.kernels.torch_threads import one_torch_thread

_ITEMS = 64
_Counts = ctypes.c_int64 * (4 * _ITEMS)


@job
def _count_items(pool, thread, threads, args):
    """args: int64 [4, _ITEMS]: each item of each of 4 phases is counted where it belongs.

    An item of a later phase is counted only if all items of the phase before are.
    """
    for phase in range(4):
        item = take(pool, phase)
        while item < _ITEMS:
            complete = True
            if phase > 0:
                for other in range(_ITEMS):
                    before = simd.atomic_load(args + 8 * (_ITEMS * (phase - 1) + other))
                    here = simd.atomic_load(args + 8 * (_ITEMS * phase + item))
                    complete = complete and before > here
            if complete:
                simd.atomic_add(args + 8 * (_ITEMS * phase + item), 1)
            finish(pool, phase)
            item = take(pool, phase)
        wait(pool, phase, _ITEMS)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_item_once_and_phases_in_order(threads: int) -> None:
    pool = Pool(threads)
    counts = _Counts()
    for runs in range(1, 200):
        pool.run(_count_items.address, counts)
        assert set(counts) == {runs}
    pool.close()


@job
def _next(pool, thread, threads, args):
    """args: addresses of int64 from [_ITEMS] and to [_ITEMS]: to[i] = from[_ITEMS - 1 - i] + 1."""
    item = take(pool, 0)
    while item < _ITEMS:
        before = simd.peek_i64(simd.peek_i64(args) + 8 * (_ITEMS - 1 - item))
        simd.poke_i64(simd.peek_i64(args + 8) + 8 * item, before + 1)
        item = take(pool, 0)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_list_of_jobs_runs_in_order(threads: int) -> None:
    """Each job reads what all threads wrote in the one before."""
    pool, steps = Pool(threads), 50
    rows = (ctypes.c_int64 * _ITEMS * (steps + 1))()
    with pool.recording() as jobs:
        for step in range(steps):
            between = (ctypes.c_int64 * 2)(*map(ctypes.addressof, rows[step : step + 2]))
            pool.run(_next.address, between)
        del between
    assert set(rows[steps]) == {steps}  # they ran while they were noted
    again = JobList(jobs)
    for start in range(1, 100):
        rows[0][:] = [start] * _ITEMS
        pool.run_all(again)
        assert set(rows[steps]) == {start + steps}
    pool.close()


@job
def _third(pool, thread, threads, args):
    """args: int64, how often it ran; the third time ends the list."""
    if take(pool, 0) == 0 and simd.atomic_add(args, 1) == 2:
        end_list(pool)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_list_runs_several_times_until_a_job_ends_it(threads: int) -> None:
    pool = Pool(threads)
    counts, rounds = _Counts(), ctypes.c_int64()
    calls: list[Any] = [(_third.address, rounds), (_count_items.address, counts)]
    again = JobList([]).between(calls[:1], calls[1:])
    for _ in range(50):
        rounds.value = 0
        counts[:] = [0] * len(counts)
        pool.run_all(again, 2)
        assert (rounds.value, set(counts)) == (2, {2})
        pool.run_all(again, 9)
        assert (rounds.value, set(counts)) == (3, {2})  # what was before it in the list
    pool.close()


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_deferred_jobs_are_done_in_order(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the end, and when someone catches up; however many they are, and whoever begins them."""
    monkeypatch.setattr("qoff.kernels.cpu.jit.pool._OPEN_JOBS", 30)
    pool, steps = Pool(threads), 50
    rows = (ctypes.c_int64 * _ITEMS * (steps + 1))()
    between = (ctypes.c_int64 * 2)()
    for start in range(1, 100):
        rows[0][:] = [start] * _ITEMS
        with pool.deferring():
            for step in range(steps):
                between[:] = [*map(ctypes.addressof, rows[step : step + 2])]
                pool.run(_next.address, between)  # which keeps what it is told
                if step == 20:
                    pool.catch_up()
                    assert set(rows[21]) == {start + 21}
        assert set(rows[steps]) == {start + steps}
    pool.close()


@job
def _until_told(pool, thread, threads, args):
    """args: address of two int64: that the job has begun, and that it may end.

    It also ends when its list is abandoned.
    """
    if take(pool, 0) == 0:
        told = simd.peek_i64(args)
        simd.atomic_store(told, 1)
        while simd.atomic_load(told + 8) == 0 and simd.atomic_load(pool + END) > 0:
            simd.spin_pause()


def _begin(pool: Pool) -> Any:
    """Defer a job, and return when another thread has begun it; it ends when `[1]` is not 0."""
    told, deadline = (ctypes.c_int64 * 2)(), monotonic() + 60
    pool.run(_until_told.address, (ctypes.c_int64 * 1)(ctypes.addressof(told)), keep=told)
    while told[0] == 0 and monotonic() < deadline:
        pass
    assert told[0] == 1
    return told


@job
def _count(pool, thread, threads, args):
    """args: address of an int64, how often the job was done."""
    if take(pool, 0) == 0:
        simd.atomic_add(simd.peek_i64(args), 1)


def test_other_threads_begin_deferred_jobs() -> None:
    pool, count = Pool(2), ctypes.c_int64()
    with pool.deferring():
        told = _begin(pool)
        pool.run(_count.address, (ctypes.c_int64 * 1)(ctypes.addressof(count)))
        assert count.value == 0
        told[1] = 1
    assert count.value == 1
    pool.close()


def test_of_deferred_jobs_none_begins_after_an_error() -> None:
    """Those that have begun end first."""
    pool, count = Pool(3), ctypes.c_int64()
    counting = (ctypes.c_int64 * 1)(ctypes.addressof(count))

    def fail() -> None:
        with pool.deferring():
            _begin(pool)
            for _ in range(3):
                pool.run(_count.address, counting)
            raise ZeroDivisionError

    for runs in range(1, 50):
        with pytest.raises(ZeroDivisionError):
            fail()
        assert count.value == runs - 1
        pool.run(_count.address, counting)
        assert count.value == runs
    pool.close()


def test_callers_take_turns() -> None:
    pool = Pool(2)
    counts = _Counts()
    callers = [
        threading.Thread(target=pool.run, args=(_count_items.address, counts)) for _ in range(4)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert set(counts) == {4}
    pool.close()


def test_close_ends_the_threads() -> None:
    before = threading.active_count()
    pool = Pool(3)
    assert threading.active_count() == before + 2
    pool.close()
    assert threading.active_count() == before


def test_threads_end_where_the_system_refuses_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would wait in memory of a pool that is gone."""
    before, start = threading.active_count(), threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name == "qoff-cpu-3":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        with pytest.raises(RuntimeError, match="new thread"):
            Pool(5)
    assert threading.active_count() == before


def test_no_threads_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Pool(0)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_gets_a_pool_of_its_own() -> None:
    default_pool()
    child = os.fork()
    if child == 0:
        counts = _Counts()
        default_pool().run(_count_items.address, counts)
        os._exit(0 if all(c == 1 for c in counts) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_pool_that_is_asked_for_while_torch_has_one_thread_has_all() -> None:
    """As one is in a round on a GPU, where the CPU only computes what is offloaded."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        usable = usable_threads()
        with one_torch_thread():
            with one_torch_thread():
                assert torch.get_num_threads() == 1
            assert usable_threads() == usable
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
