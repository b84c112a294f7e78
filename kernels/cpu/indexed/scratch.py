"""What choosing tokens and attending to them take of a pool's workspace, in bytes.

Without compiled code: what plans memory reads it, too. Jobs compile the functions that say what a
thread has, which therefore call nothing.
"""

from __future__ import annotations

from qoff.kernels.cpu.attention.scratch import TILE_ROWS
from qoff.kernels.layout.ragged import ITEM_TOKENS

RUN_KEYS = 256  # keys that are scored together
RUN_CHOSEN = 128  # tokens that are attended together
MOST_HEADS = 64  # of an item of the work
_SCORES = 16 << 20  # scores of more rows than this has room for come in parts


def padded(count: int) -> int:
    """A number rounded up to whole vectors of 16."""
    return -(-count // 16) * 16


def choose_thread_bytes(heads: int, dim: int) -> int:
    """Of a thread that scores: scales of a block, queries, scores of a tile, keys."""
    lanes = (heads + 15) // 16 * 16
    return 8 * dim + 4 * lanes * (dim + TILE_ROWS) + 4 * RUN_KEYS * dim


def groups_together(rows: int, longest: int, groups: int, each: int) -> int:
    """Groups of up to `each` rows, of so many rows in all, whose scores are there at once."""
    fitting = _SCORES // (4 * padded(longest))
    return groups if rows <= fitting else max(1, fitting // each)


def choose_bytes(threads: int, heads: int, dim: int, rows: int, longest: int) -> int:
    """The most of `choose` for up to so many rows, and sequences of up to so many tokens."""
    scores = 4 * rows * padded(longest)
    if scores > _SCORES:
        scores = max(_SCORES, 4 * min(rows, ITEM_TOKENS) * padded(longest))
    return threads * choose_thread_bytes(heads, dim) + scores


def attend_thread_bytes(heads: int, dim: int, latent: int) -> int:
    """Of a thread that attends with so many heads: scales of a block, queries, scores and weights;
    maxima, sums and corrections; what was found; keys. Then pairs of queries, keys and values, and
    weights of bfloat16."""
    lanes = (heads + 15) // 16 * 16
    each = dim + 2 * RUN_CHOSEN + 2 + 4 + latent
    floats = 8 * dim + 4 * lanes * each + 4 * RUN_CHOSEN * dim
    pairs = 2 * lanes * dim + (2 + 2) * RUN_CHOSEN * dim + 2 * lanes * RUN_CHOSEN + 64
    return floats + (pairs + 63) // 64 * 64


def heads_together(heads: int, rows: int, threads: int) -> int:
    """Heads of an item of the work: as many as leave each thread an item, 16 to MOST_HEADS."""
    wanted = -(-threads // max(1, rows))
    return min(MOST_HEADS, max(16, padded(heads) // wanted // 16 * 16))


def attend_bytes(threads: int, dim: int, latent: int, heads: int) -> int:
    """`attend_chosen` with so many heads, of any number of rows."""
    return threads * attend_thread_bytes(min(heads, MOST_HEADS), dim, latent)
