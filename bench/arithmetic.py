"""How many products of bytes this processor adds up a second: the limit of prompts and batches.

A product with 16-bit activations takes two such products (`kernels/cpu/linear/tile.py`), one with
8-bit activations one.
"""

from __future__ import annotations

import ctypes
import time
from functools import cache
from typing import Any

import numba
import torch
from llvmlite import ir
from numba import types

from qoff.kernels.cpu.jit import simd
from qoff.kernels.cpu.jit.compiled import JOB
from qoff.kernels.cpu.jit.emit import I32, V_I32, dot_u8s8, loop, splat
from qoff.kernels.cpu.jit.pool import default_pool
from qoff.kernels.cpu.jit.simd import vector_intrinsic

_CHAINS = 12  # independent sums, so that none waits for its last addition
_STEPS = 2_000_000  # products of each sum: 10 ms and more
_PRODUCTS = 64  # of one instruction on one vector


def products_per_s() -> float:
    """Products of bytes, added up in 32 bits, a second on the threads of the CPU ops."""
    pool = default_pool()
    sums = torch.zeros(pool.threads, 8, dtype=torch.int64)  # a cache line each
    args = (ctypes.c_int64 * 2)(sums.data_ptr(), _STEPS)
    job = _dots_job().address
    start = time.perf_counter()
    pool.run(job, args)
    return _PRODUCTS * _CHAINS * _STEPS * pool.threads / (time.perf_counter() - start)


@vector_intrinsic(simd.i32x16, types.int64)
def _dots(b: Any, steps: ir.Value) -> ir.Value:
    """Sums of products, over all chains."""
    ones = splat(b, ir.Constant(I32, 0x01010101), V_I32)
    zero = ir.Constant(V_I32, None)
    _, sums, close = loop(b, steps, [zero] * _CHAINS)
    # Each multiplies what it has: the compiler cannot know the result.
    sums = close([dot_u8s8(b, one, one, ones) for one in sums])
    total = sums[0]
    for one in sums[1:]:
        total = b.add(total, one)
    return total


@cache
def _dots_job() -> Any:
    return numba.cfunc(JOB, nopython=True, error_model="numpy")(_run)


def _run(pool: int, thread: int, threads: int, args: int) -> None:
    found = simd.sum_i32(_dots(simd.peek_i64(args + 8)))
    simd.poke_i64(simd.peek_i64(args) + 64 * thread, found)
