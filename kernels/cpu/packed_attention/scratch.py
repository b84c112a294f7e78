"""What attention over packed blocks on the CPU, and packing, take of a pool's workspace, in bytes.

Without compiled code: what plans memory reads it, too. Jobs compile `chunk_count`, `thread_bytes`
and `packing_bytes`, which therefore call nothing.
"""

from __future__ import annotations

from qoff.kernels.layout.kv_format import BLOCK_TOKENS, LATENT_DIM, KVFormat
from qoff.kernels.layout.layer_cache import RUN_BLOCKS

TOKENS = BLOCK_TOKENS
ROWS = 16  # of one call
TOGETHER = 4  # rows: their sums and 16 words of keys fill the registers

# Of a group of rows, quads: scales and offsets, what was summed before, and for both parts of V the
# scale of weights and what is added to what they sum up to.
FACTORS_BYTES = 448
# What V makes of probabilities, float32: [2 parts, 2, 64], their scales as parts of the part's
# largest, and what they add to SHIFT; [64], what the logarithm of either scale is not above; [2,
# 16], the largest scales.
PART_BYTES = 2 * 4 * TOKENS
BOUND = 2 * PART_BYTES
LARGEST = BOUND + 4 * TOKENS
VALUES_BYTES = LARGEST + 2 * 64

# Memory of a thread for a block, in bytes from its start; what belongs to a row is there for
# TOGETHER rows.
QUERY = 0  # int8 [rows, 2, up to LATENT_DIM]
SCORES = QUERY + TOGETHER * 2 * LATENT_DIM  # float32 [rows, 64]
WEIGHTS = SCORES + TOGETHER * 4 * TOKENS  # uint8 [2 parts, rows, 64]
FACTORS = WEIGHTS + 2 * TOGETHER * TOKENS
KEYS = FACTORS + FACTORS_BYTES  # float32 [2, up to LATENT_DIM], scales and minima
LANES = KEYS + 2 * 4 * LATENT_DIM  # the same in the lanes of the output, of latent values
VALUES = LANES + 2 * 4 * LATENT_DIM + 64
K_CODES = VALUES + VALUES_BYTES  # uint8 [64, up to LATENT_DIM / 2], of less than 4 bits
V_CODES = K_CODES + TOKENS * LATENT_DIM // 2
# Then, of all rows maxima, sums and the addresses of their queries; of the rows of a group the
# first token that they attend to.
MAXIMA = V_CODES + TOKENS * LATENT_DIM // 2
SUMS, QUERY_PLACES, FIRSTS = MAXIMA + 16 * ROWS, MAXIMA + 32 * ROWS, MAXIMA + 40 * ROWS
THREAD_BYTES = FIRSTS + 64  # a whole cache line
STATE_BYTES = 64  # likewise, of a maximum and a sum

FOLDED_BYTES = 2 * 4 * LATENT_DIM  # of a thread that selects: the queries of one KV head


def chunk_count(half: int) -> int:
    """Chunks of 64 lanes that the channels of V take."""
    return 1 if half == 32 else 2 * ((half + 63) // 64)


def thread_bytes(chunks: int) -> int:
    """Bytes of a thread: for a block, outputs of all rows, the result of a query."""
    return THREAD_BYTES + (ROWS + 1) * 256 * chunks + STATE_BYTES


def token_bytes(form: KVFormat, heads: int, runs: int) -> int:
    """Partial results of one token: maxima, sums, outputs of each run.

    One run needs none: who attends a query has its result.
    """
    return 0 if runs == 1 else runs * heads * (8 + 256 * chunk_count(form.half))


def decode_runs(blocks: int) -> int:
    """Runs of a decode pass that attends to so many blocks of a sequence at most."""
    return max(1, -(-blocks // RUN_BLOCKS))


def attend_bytes(threads: int, form: KVFormat, partials: int) -> int:
    """`packed_attention`: a block of each thread, and so many bytes of partial results."""
    return threads * thread_bytes(chunk_count(form.half)) + partials


def select_bytes(threads: int, tokens: int, kv_heads: int, blocks: int) -> int:
    """`select_blocks` of so many tokens from so many blocks each: their scores."""
    return threads * FOLDED_BYTES + 4 * tokens * kv_heads * (-(-blocks // 16) * 16)


def packing_bytes(dim: int) -> int:
    """Bytes of a thread that packs: V and 4-bit codes of a block, 16 x 16 codes, three numbers a
    channel or token."""
    return BLOCK_TOKENS * dim * 9 // 2 + 256 + 12 * max(dim, 2 * BLOCK_TOKENS)


def pack_bytes(threads: int, form: KVFormat) -> int:
    """`pack_blocks`, of any number of them."""
    return threads * packing_bytes(form.head_dim)
