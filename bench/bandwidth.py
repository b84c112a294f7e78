"""How fast this machine reads memory: the limit of everything that is bound by weights."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numba
import numpy as np
import torch

from bench.sampling import timed
from qoff.kernels.cpu.jit import simd
from qoff.kernels.cpu.jit.compiled import JOB
from qoff.kernels.cpu.jit.pool import default_pool, take
from qoff.measure.samples import Samples
from qoff.memory.arena import map_pages

BUFFER_BYTES = 256 << 20
_RUN = 16  # pieces a thread takes at a time
_BLOCK = 1 << 20  # bytes a thread takes at a time; the buffer is a multiple of it


class ReadBandwidth:
    """Reading a buffer once, on all threads, in three ways; the best of them is the bandwidth.

    The buffer, `nbytes` in whole MiB, should be far larger than the last-level cache; it lies in
    huge pages, as qoff's arenas do, where the system has them. On a shared machine the bandwidth
    changes by the minute: sample `ways` between what is compared with it.
    """

    def __init__(self, nbytes: int = BUFFER_BYTES) -> None:
        self.buffer = map_pages(nbytes // _BLOCK * _BLOCK).view(torch.float32).fill_(1)

    def ways(self) -> dict[str, Callable[[], float]]:
        """Return the ways, by name; each reads once and returns the seconds it took."""
        buffer = self.buffer
        return {
            "read, torch sum": timed(buffer.sum),
            "read, torch max": timed(buffer.max),
            "read, numba SIMD": timed(lambda: read_all(buffer)),
        }

    def best(self, seconds: Mapping[str, Samples]) -> Samples:
        """Return bytes per second of the fastest way, from the seconds of each."""
        ways = [samples for name, samples in seconds.items() if name.startswith("read, ")]
        fastest = min(ways, key=lambda samples: samples.median)
        return Samples(tuple(self.buffer.nbytes / s for s in fastest.values))


def read_all(buffer: torch.Tensor) -> float:
    """Read a contiguous float32 buffer, whole MiB, on the pool of the CPU ops; returns its sum."""
    pool = default_pool()
    sums = torch.zeros(pool.threads, 16)  # a cache line for each thread
    args = (ctypes.c_int64 * 3)(buffer.data_ptr(), buffer.nbytes // _BLOCK, sums.data_ptr())
    pool.run(_read_job().address, ctypes.addressof(args))
    return float(sums.sum())


def read_pieces(addresses: torch.Tensor, nbytes: int) -> float:
    """Read `nbytes`, a multiple of 256, at each address; returns the sum, as of float32 numbers.

    On the pool of the CPU ops, each piece asked for while the one before is read. addresses: int64,
    on the CPU.
    """
    pool = default_pool()
    sums = torch.zeros(pool.threads, 16)
    args = (ctypes.c_int64 * 4)(addresses.data_ptr(), len(addresses), sums.data_ptr(), nbytes)
    pool.run(_pieces_job().address, ctypes.addressof(args))
    return float(sums.sum())


@cache
def _read_job() -> Any:
    return numba.cfunc(JOB, nopython=True, error_model="numpy")(_read)


@cache
def _pieces_job() -> Any:
    return numba.cfunc(JOB, nopython=True, error_model="numpy")(_read_pieces)


def _read(pool: int, thread: int, threads: int, args: int) -> None:
    """Blocks of the buffer, four vectors at a time, into four independent sums."""
    base, blocks = simd.peek_i64(args), simd.peek_i64(args + 8)
    a = b = c = d = simd.splat_f32(np.float32(0.0))
    block = take(pool, 0)
    while block < blocks:
        start = base + block * _BLOCK
        for i in range(start, start + _BLOCK, 256):
            a = simd.add(a, simd.load_f32(i))
            b = simd.add(b, simd.load_f32(i + 64))
            c = simd.add(c, simd.load_f32(i + 128))
            d = simd.add(d, simd.load_f32(i + 192))
        block = take(pool, 0)
    total = simd.sum_f32(simd.add(simd.add(a, b), simd.add(c, d)))
    simd.poke_f32(simd.peek_i64(args + 16) + 64 * thread, total)


def _read_pieces(pool: int, thread: int, threads: int, args: int) -> None:
    """Runs of pieces, as `_read` reads blocks."""
    addresses, count = simd.peek_i64(args), simd.peek_i64(args + 8)
    nbytes = simd.peek_i64(args + 24)
    a = b = c = d = simd.splat_f32(np.float32(0.0))
    run = take(pool, 0)
    while run * _RUN < count:
        for piece in range(run * _RUN, min(count, (run + 1) * _RUN)):
            start = simd.peek_i64(addresses + 8 * piece)
            ahead = simd.peek_i64(addresses + 8 * min(piece + 1, count - 1)) - start
            for i in range(start, start + nbytes, 256):
                for line in range(i + ahead, i + ahead + 256, 64):
                    simd.prefetch(line)
                a = simd.add(a, simd.load_f32(i))
                b = simd.add(b, simd.load_f32(i + 64))
                c = simd.add(c, simd.load_f32(i + 128))
                d = simd.add(d, simd.load_f32(i + 192))
        run = take(pool, 0)
    total = simd.sum_f32(simd.add(simd.add(a, b), simd.add(c, d)))
    simd.poke_f32(simd.peek_i64(args + 16) + 64 * thread, total)
