"""What attention on the CPU takes of a pool's workspace, in bytes.

Without compiled code: what plans memory reads it, too. Jobs compile `row_bytes` and `tile_places`,
which therefore call nothing.
"""

from __future__ import annotations

from qoff.kernels.cpu.linear.scratch import SCALES_BYTES
from qoff.kernels.layout.heads import HeadShape
from qoff.kernels.layout.latent import LatentShape
from qoff.kernels.layout.layer_cache import RUN_TOKENS

TILE_ROWS = 6  # at most
SCORES = 4 * (RUN_TOKENS + 16)  # of one row
STATE_BYTES = 384  # of a tile's rows: maxima, sums, corrections
_PARTIALS = 32 << 20  # partial results of more tokens than this has room for come in parts
_OF_THREAD = 4 << 20  # but so many bytes for each thread


def partials_together(threads: int, each: int) -> int:
    """Tokens of a decode pass whose partial results, of so many bytes each, are there at once.

    Enough of them to keep all threads at work; what is found does not depend on it.
    """
    return max(1, max(_PARTIALS, threads * _OF_THREAD) // max(1, each))


def most_partials(threads: int, tokens: int, each: int) -> int:
    """The most bytes of partial results of passes whose tokens have `each` bytes or fewer.

    Several tokens with fewer bytes may take more than those that are together with so many.
    """
    return max(each, min(tokens * each, max(_PARTIALS, threads * _OF_THREAD)))


def row_bytes(value_dim: int) -> int:
    """Bytes of a row's running attention: its part of the state of its tile; the output."""
    return STATE_BYTES + 4 * value_dim


def most_tokens(group: int) -> int:
    """How many tokens at most attend to a run of keys while it is in a cache, all heads of them."""
    return TILE_ROWS * max(1, 12 // group)


def tile_places(dim: int, value_dim: int, rows: int, width: int) -> tuple[int, int, int, int]:
    """Where a thread of a prefill pass has keys and values as pairs, states of rows, and its end.

    Scores are before them, and queries as pairs, if they are; width: 2 if so, or 4. rows: query
    heads of a KV head for `most_tokens`, all of whose states are there.
    """
    keys = TILE_ROWS * SCORES + 64 + 2 * dim * rows
    values = keys + 2 * dim * RUN_TOKENS
    states = TILE_ROWS * SCORES if width == 4 else values + 2 * value_dim * RUN_TOKENS
    return keys, values, states, states + rows * (STATE_BYTES + 4 * value_dim)


def prefill_bytes(threads: int, shape: HeadShape, width: int) -> int:
    """`attention` of a prefill pass; width: bytes of a number, 4, or 2 for pairs of bfloat16."""
    group = shape.heads // shape.kv_heads
    *_, end = tile_places(shape.head_dim, shape.value_dim, group * most_tokens(group), width)
    return threads * end


def decode_runs(longest: int) -> int:
    """Runs of a decode pass whose newest token has this place."""
    return longest // RUN_TOKENS + 1


def token_bytes(shape: HeadShape, runs: int) -> int:
    """Partial results of one token of a decode pass."""
    return runs * shape.heads * row_bytes(shape.value_dim)


def decode_bytes(threads: int, partials: int) -> int:
    """`attention` of a decode pass: scores of each thread's tile, and so many partial results."""
    return threads * TILE_ROWS * SCORES + partials


def head_matrix_bytes(latent: int, rows: int) -> int:
    """Of a thread of `absorb` and `expand`: scales, and the larger matrix of a head, float32."""
    return SCALES_BYTES + 4 * rows * latent


def latent_bytes(threads: int, shape: LatentShape) -> int:
    """`absorb` and `expand`, of any number of tokens."""
    return threads * head_matrix_bytes(shape.latent, max(shape.nope_dim, shape.value_dim))
