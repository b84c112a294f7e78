"""What a thread multiplies at a time: a tile of up to 4 tokens, or a panel of up to 64."""

from __future__ import annotations

from numba import types

from qoff.kernels.cpu.jit import simd
from qoff.kernels.cpu.jit.compiled import inlined, outlined

from .panel import PANELS, ROW_BLOCKS, panel
from .scratch import PANEL_TOKENS, SUMS_BYTES
from .tile import tile

TILE_TOKENS = 4  # of the widest tile
CACHED_BYTES = 256 << 10  # activations kept in L2 while weights pass by


@inlined
def widest():
    """How many tokens are multiplied at a time, at most."""
    return PANEL_TOKENS if PANELS else TILE_TOKENS


@inlined
def is_panel(row_blocks, tokens):
    """Whether so many tokens are a panel. Its sums are in scratch, and no residual is added."""
    return PANELS and row_blocks == ROW_BLOCKS and tokens > TILE_TOKENS


@inlined
def at_a_time(row_blocks, left):
    """How many of the tokens that are left are multiplied next."""
    if row_blocks == 1:
        return 1
    if is_panel(row_blocks, left):
        return min(left, PANEL_TOKENS)
    return 4 if left >= 4 else (2 if left >= 2 else 1)


@inlined
def while_cached(k):
    """For how many tokens row blocks are gone through, before they are for the next ones."""
    return max(TILE_TOKENS, CACHED_BYTES // (2 * k) // TILE_TOKENS * TILE_TOKENS)


@outlined(*[types.int64] * 22)
def multiply(bits, row_blocks, tokens, planes, scratch, codes, codes_stride, scale_min,
             scale_min_stride, width, group, groups, high, low, k, scales, out, block_stride,
             stride, residual, residual_stride, ahead):  # fmt: skip
    """One tile or panel; behind its scratch, the operands are those of `tile.Operands`."""
    simd.aligned_stack()
    if is_panel(row_blocks, tokens):
        panel(bits, planes, tokens, scratch + SUMS_BYTES, codes, codes_stride, scale_min,
              scale_min_stride, width, group, groups, high, low, k, scales, out, block_stride,
              stride, residual, residual_stride, ahead)  # fmt: skip
    else:
        tile(bits, row_blocks, tokens, planes, codes, codes_stride, scale_min, scale_min_stride,
             width, group, groups, high, low, k, scales, out, block_stride, stride, residual,
             residual_stride, ahead)  # fmt: skip
