"""What linear ops on the CPU take of a pool's workspace, in bytes; what plans memory reads it, too.

Like the other modules of this name it is without compiled code.
"""

from __future__ import annotations

PANEL_TOKENS = 64  # of a panel, see `panel`
SUMS_BYTES = 2 * PANEL_TOKENS * 64  # of a thread: a panel's sums, [2, 64, 16] float32, or a tile's
TILE_BYTES = SUMS_BYTES + 8192  # and the codes of a panel's group: 32 of 128, as two nibbles each
SCALES_BYTES = 128  # of a thread: scales and minima of one group of a row block, float32


def quantized_bytes(k: int, group: int) -> int:
    """A row of K numbers for a product: two planes of int8, a scale and a sum of each group."""
    return 2 * k + 8 * (k // group)


def linear_bytes(threads: int, tokens: int, k: int, group: int, *, normed: bool) -> int:
    """`w4_linear` of tokens [M, K]; normed: with a norm before it."""
    own = TILE_BYTES + 4 * k * normed
    return threads * own + tokens * quantized_bytes(k, group)


def low_rank_bytes(threads: int, tokens: int, k: int, rank: int, *, normed: bool) -> int:
    """`low_rank` of tokens [M, K], whose adapters have `rank` rows at most."""
    return threads * 4 * k * normed + 4 * tokens * rank


def dequantize_bytes(threads: int) -> int:
    """`dequantize`, of any matrix."""
    return threads * SCALES_BYTES
