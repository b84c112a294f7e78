"""Jobs run on every thread exactly once, phases hold, threads go away."""

from __future__ import annotations

import ctypes
import os
import threading

import numpy as np
import pytest

from qoff.kernels.cpu.jit import simd
from qoff.kernels.cpu.jit.compiled import job
from qoff.kernels.cpu.jit.pool import Pool, default_pool, finish, take, wait

_ITEMS = 64


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
    counts = np.zeros((4, _ITEMS), dtype=np.int64)
    for runs in range(1, 200):
        pool.run(_count_items.address, counts.ctypes.data)
        assert (counts == runs).all()
    pool.close()


def test_callers_take_turns() -> None:
    pool = Pool(2)
    counts = np.zeros((4, _ITEMS), dtype=np.int64)
    callers = [
        threading.Thread(target=pool.run, args=(_count_items.address, counts.ctypes.data))
        for _ in range(4)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert (counts == 4).all()
    pool.close()


def test_close_ends_the_threads() -> None:
    before = threading.active_count()
    pool = Pool(3)
    assert threading.active_count() == before + 2
    pool.close()
    assert threading.active_count() == before


def test_no_threads_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Pool(0)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_gets_a_pool_of_its_own() -> None:
    default_pool()
    child = os.fork()
    if child == 0:
        counts = (ctypes.c_int64 * (4 * _ITEMS))()
        default_pool().run(_count_items.address, ctypes.addressof(counts))
        os._exit(0 if all(c == 1 for c in counts) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
