"""How fast this machine reads memory and disk and copies: limits of what is bound by weights."""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from time import perf_counter
from typing import Any, NamedTuple

import numba
import numpy as np
import torch

from bench.sampling import timed, torch_threads
from qoff.checkpoint import Checkpoint
from qoff.kernels.cpu.jit import simd
from qoff.kernels.cpu.jit.compiled import JOB
from qoff.kernels.cpu.jit.pool import default_pool
from qoff.kernels.cpu.jit.pool_threads import take
from qoff.measure.samples import Samples
from qoff.memory import DiskReader
from qoff.memory.arena import map_pages

BUFFER_BYTES = 256 << 20
_RUN = 16  # pieces a thread takes at a time
_PIECE = 32 << 20  # bytes of a file that are read into one buffer
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


class RawRead:
    """Whole layer files, one after the other, by a reader as the store has: bytes per second."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._pieces = [
            (file.path, start, min(_PIECE, file.nbytes - start))
            for file in checkpoint.layers
            for start in range(0, file.nbytes, _PIECE)
        ]
        self._buffers = [map_pages(_PIECE) for _ in range(2)]
        self.reader = DiskReader()

    def __call__(self) -> float:
        start = perf_counter()
        pending = [self._submit(0)]
        for i in range(1, len(self._pieces)):
            pending.append(self._submit(i))
            pending.pop(0).result()  # then its buffer is free for the piece after this
        pending.pop().result()
        return sum(size for _, _, size in self._pieces) / (perf_counter() - start)

    def _submit(self, i: int) -> Any:
        path, start, size = self._pieces[i]
        return self.reader.submit(path, start, self._buffers[i % 2][:size])


class Shared(NamedTuple):
    """What is left while all cores read memory and a disk is read: parts of the rates alone."""

    cores: float
    disk: float

    def seconds(self, computing: float, reading: float) -> float:
        """The least time for both, of their times alone: one beside the other as long as it pays.

        As if the computation did nothing but read memory.
        """
        both = min(computing / self.cores, reading / self.disk)
        beside = both + (computing - both * self.cores) + (reading - both * self.disk)
        return min(computing + reading, beside)


def shared(raw: RawRead, buffer: torch.Tensor, alone: float) -> Shared:
    """Read memory on all cores while `raw` goes on. alone: its rate. buffer: as `read_all` has it.

    A part is at most 1.
    """
    free = statistics.median(timed(lambda: read_all(buffer))() for _ in range(3))
    with ThreadPoolExecutor(1) as thread:
        reading, start, count = thread.submit(lambda: [raw() for _ in range(4)]), perf_counter(), 0
        while not reading.done():
            read_all(buffer)
            count += 1
        cores = count * free / (perf_counter() - start)
        return Shared(min(1.0, cores), min(1.0, statistics.median(reading.result()) / alone))


def copy_rate(device: torch.device | str = "cpu", nbytes: int = 256 << 20) -> float:
    """Bytes per second of copies alone: pinned memory to a GPU, or on a CPU by one thread."""
    on_gpu = torch.device(device).type != "cpu"
    source = torch.ones(nbytes, dtype=torch.uint8, pin_memory=on_gpu)
    dest = torch.empty(nbytes, dtype=torch.uint8, device=device)
    seconds = []
    with torch_threads(1):
        for _ in range(8 if on_gpu else 3):
            start = perf_counter()
            dest.copy_(source, non_blocking=True)
            if on_gpu:
                torch.cuda.synchronize(device)
            seconds.append(perf_counter() - start)
    return nbytes / statistics.median(seconds)


def read_all(buffer: torch.Tensor) -> float:
    """Read a contiguous float32 buffer, whole MiB, on the pool of the CPU ops; returns its sum."""
    pool = default_pool()
    sums = torch.zeros(pool.threads, 16)  # a cache line for each thread
    args = (ctypes.c_int64 * 3)(buffer.data_ptr(), buffer.nbytes // _BLOCK, sums.data_ptr())
    pool.run(_read_job().address, args)
    return float(sums.sum())


def read_pieces(addresses: torch.Tensor, nbytes: int) -> float:
    """Read `nbytes`, a multiple of 256, at each address; returns the sum, as of float32 numbers.

    On the pool of the CPU ops, each piece asked for while the one before is read. addresses: int64,
    on the CPU.
    """
    pool = default_pool()
    sums = torch.zeros(pool.threads, 16)
    args = (ctypes.c_int64 * 4)(addresses.data_ptr(), len(addresses), sums.data_ptr(), nbytes)
    pool.run(_pieces_job().address, args)
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
