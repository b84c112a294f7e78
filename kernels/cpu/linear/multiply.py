"""What a thread multiplies at a time: up to 64 tokens, as a panel or in tiles of up to 8."""

from __future__ import annotations

from numba import types

from qoff.kernels.cpu.jit import simd
from qoff.kernels.cpu.jit.compiled import inlined, outlined

from .panel import PANELS, ROW_BLOCKS, panel
from .scratch import SUMS_BYTES
from .tile import AHEAD_BYTES, UNROLL, WIDEST, tile

TILE_TOKENS = 4  # of the widest tile of 16-bit activations
CACHED_BYTES = 256 << 10  # activations kept in L2 while weights pass by


@inlined
def is_panel(row_blocks, tokens):
    """Whether so many tokens are a panel. Its sums are in scratch, and no residual is added."""
    return PANELS and row_blocks == ROW_BLOCKS and tokens > TILE_TOKENS


@inlined
def while_cached(k):
    """For how many tokens row blocks are gone through, before they are for the next ones."""
    return max(TILE_TOKENS, CACHED_BYTES // (2 * k) // TILE_TOKENS * TILE_TOKENS)


@inlined
def _of_tile(row_blocks, planes, left):
    """How many of the tokens that are left are the next tile."""
    if row_blocks == 1:
        return 1
    if planes == 1 and left >= WIDEST:
        return WIDEST
    return 4 if left >= 4 else (2 if left >= 2 else 1)


@outlined(*[types.int64] * 22)
def multiply(bits, row_blocks, tokens, planes, scratch, codes, codes_stride, scale_min,
             scale_min_stride, width, group, groups, high, low, k, scales, out, block_stride,
             stride, residual, residual_stride, ahead):  # fmt: skip
    """1 or 2 row blocks times up to PANEL_TOKENS tokens.

    Behind its scratch, the operands are those of `tile.Operands`. ahead: the row blocks' codes that
    follow, which are as many.
    """
    simd.aligned_stack()
    if is_panel(row_blocks, tokens):
        panel(bits, planes, tokens, scratch + SUMS_BYTES, codes, codes_stride, scale_min,
              scale_min_stride, width, group, groups, high, low, k, scales, out, block_stride,
              stride, residual, residual_stride, ahead)  # fmt: skip
        return
    end = ahead + row_blocks * codes_stride
    while tokens > 0:
        count = _of_tile(row_blocks, planes, tokens)
        tile(bits, row_blocks, count, planes, codes, codes_stride, scale_min, scale_min_stride,
             width, group, groups, high, low, k, scales, out, block_stride, stride, residual,
             residual_stride, ahead)  # fmt: skip
        tokens -= count
        high += count * k
        low += count * k
        scales += count * groups * 8
        out += count * stride
        if residual != 0:
            residual += count * residual_stride
        if ahead != 0:
            ahead += AHEAD_BYTES // UNROLL * k
            if ahead >= end:
                ahead = 0
