"""The positions of the largest scores, on a GPU, in their order: a radix select.

A program has a row. Scores become 32-bit integers of the same order. Four passes over them, each
with a histogram of eight bits of those that agree with what is known, find the least that is
chosen; a last one writes the positions of those above it, and the first of those equal to it.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from functools import cache

import triton
import triton.language as tl
from torch import Tensor

from qoff.kernels.triton.attention.select_blocks import ordered
from qoff.kernels.triton.launch.bound import BoundKernel
from qoff.kernels.triton.launch.sizes import next_power_of_2

_CHUNK = 2048  # scores of a program at a time, at most
_BINS = tl.constexpr(256)  # of a digit of eight bits
_SIGN = tl.constexpr(-(2**31))


@triton.jit
def _load_keys(scores, at, count):
    """Scores as unsigned integers of their order."""
    score = tl.load(scores + at, mask=at < count, other=0.0)
    return (ordered(score) ^ _SIGN).to(tl.uint32, bitcast=True)


@triton.jit(do_not_specialize=["most", "first"])
def index_select_kernel(
    scores,  # float32 [rows, most]
    positions,
    order,
    chosen,  # int32 [M, TOP]
    most,
    first,  # row of the pass that scores begin with
    TOP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """List what a row chose: of equal scores the first; of a row at a position below TOP all."""
    row = first + tl.program_id(0)
    count = tl.load(positions + row).to(tl.int32) + 1
    place = row.to(tl.int64)
    if order is not None:
        place = tl.load(order + row)
    into = chosen + place * TOP
    lane = tl.arange(0, CHUNK)
    if count <= TOP:
        for begin in range(0, count, CHUNK):
            tl.store(into + begin + lane, begin + lane, mask=begin + lane < count)
        return
    source = scores + tl.program_id(0).to(tl.int64) * most
    digit = tl.arange(0, _BINS)
    least = tl.zeros([], tl.uint32)
    known = tl.zeros([], tl.uint32)  # which bits of it are
    wanted = tl.full([], TOP, tl.int32)  # of those that agree with it
    for step in range(4):
        shift = 24 - 8 * step
        found = tl.zeros([_BINS], tl.int32)
        for begin in range(0, count, CHUNK):
            at = begin + lane
            key = _load_keys(source, at, count)
            agrees = (at < count) & ((key & known) == least)
            found += tl.histogram(((key >> shift) & (_BINS - 1)).to(tl.int32), _BINS, mask=agrees)
        above = tl.sum(found) - tl.cumsum(found)  # with a larger digit
        # The smallest digit with fewer than `wanted` above it.
        best = tl.min(tl.where(above < wanted, digit, _BINS - 1))
        wanted -= tl.sum(tl.where(digit == best, above, 0))
        least |= best.to(tl.uint32) << shift
        known |= tl.full([], _BINS - 1, tl.uint32) << shift
    taken = tl.zeros([], tl.int32)
    for begin in range(0, count, CHUNK):
        at = begin + lane
        key = _load_keys(source, at, count)
        same = ((key == least) & (at < count)).to(tl.int32)
        above_least = (key > least) & (at < count)
        take = (above_least | ((same > 0) & (tl.cumsum(same) <= wanted))).to(tl.int32)
        tl.store(into + taken + tl.cumsum(take) - 1, at, mask=take > 0)
        taken += tl.sum(take)
        wanted -= tl.sum(same)


def index_select(
    scores: Tensor, positions: Tensor, order: Tensor | None, rows: range, chosen: Tensor
) -> None:
    """Write the positions that rows attend to, ascending, to `chosen`, int32 [M, top].

    scores: float32 [len(rows), most], of positions up to each row's own, which `positions` has;
    those of rows that attend to all are not read. order: the places of rows in `chosen`.
    """
    most = scores.shape[1]
    chunk = min(_CHUNK, max(64, next_power_of_2(most)))
    kernel = _bound(chosen.shape[1], chunk)
    kernel((len(rows), 1, 1), scores, positions, order, chosen, most, rows.start)


@cache
def _bound(top: int, chunk: int) -> BoundKernel:
    warps = max(1, min(8, chunk // 256))
    return BoundKernel(index_select_kernel, TOP=top, CHUNK=chunk, num_warps=warps, num_stages=1)
