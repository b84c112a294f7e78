"""What jobs know of a cache of experts and of a request, and how they look at it."""

from __future__ import annotations

import ctypes

from llvmlite import ir
from numba import carray, types

from qoff.kernels.cpu.jit import read_queue, simd
from qoff.kernels.cpu.jit.compiled import inner
from qoff.kernels.cpu.jit.emit import I8, I64
from qoff.kernels.cpu.operands import int64s, offsets


class CacheWords(ctypes.Structure):
    """What the jobs of a cache know: addresses, then numbers.

    Of int64 by key: slots, layers, offsets, pieces, chunks (addresses of int64 [pieces, 4]), sizes;
    of float64: shares, ranks; of bytes: grows. By layer: first, the key of its first expert; files;
    arrived, whether some of it came in this pass; of bytes: late. By slot: keys, queue_keys; of
    bytes: fixed, guessed, came, queued.
    Lists, of int64, begin with their length: free, reading, guesses, doubtful, asked (numbers of
    requests), nothing. Space for all slots: leaving, worths.
    """

    _fields_ = (
        *int64s(
            "queue", "slots", "layers", "offsets", "pieces", "chunks", "sizes", "shares",
            "ranks", "grows", "first", "files", "arrived", "late",
            "keys", "queue_keys", "fixed", "guessed", "came", "queued",
            "free", "reading", "guesses", "doubtful", "asked", "leaving", "worths", "nothing",
            "memory", "stride", "spoiled", "count", "num_layers", "at", "unread",
            "until", "ended", "why", "waited", "request", "noted", "resolved",
            "num_hits", "num_misses", "num_bytes", "num_guesses", "num_right", "num_guessed",
            "num_wrong",
        ),
        ("accuracy", ctypes.c_double),
        ("age", ctypes.c_double),
        ("least_accuracy", ctypes.c_double),
        ("share_age", ctypes.c_double),
    )  # fmt: skip


class RequestWords(ctypes.Structure):
    """A request: of which cache, its number and layer, and how many pairs of a token and an expert.

    Addresses of int64: ids and guesses (0 for none) of pairs; chosen, a list of keys; places, of
    each pair the slot. following: the layer that is guessed. nearly_all: so many experts without a
    guess are for Python. biases: of two matrices the address of all experts', float32, 0 for none;
    then where the slots have theirs; and bytes of one expert's.
    """

    _fields_ = int64s(
        "cache", "number", "layer", "pairs", "ids", "guesses", "following", "chosen", "places",
        "nearly_all", "bias_0", "bias_1", "to_0", "to_1", "bias_bytes_0", "bias_bytes_1",
    )  # fmt: skip


(
    QUEUE, SLOTS, LAYERS, OFFSETS, PIECES, CHUNKS, SIZES, SHARES,
    RANKS, GROWS, FIRST, FILES, ARRIVED, LATE,
    KEYS, QUEUE_KEYS, FIXED, GUESSED, CAME, QUEUED,
    FREE, READING, GUESSES, DOUBTFUL, ASKED, LEAVING, WORTHS, NOTHING,
    MEMORY, STRIDE, SPOILED, COUNT, NUM_LAYERS, AT, UNREAD,
    UNTIL, ENDED, WHY, WAITED, REQUEST, NOTED, RESOLVED,
    HITS, MISSES, BYTES, NUM_GUESSES, RIGHT, NUM_GUESSED, WRONG,
    ACCURACY, AGE, LEAST_ACCURACY, SHARE_AGE,
) = offsets(CacheWords)  # fmt: skip
(
    CACHE, NUMBER, LAYER, PAIRS, IDS, GUESS_IDS, FOLLOWING, CHOSEN, PLACES,
    NEARLY_ALL, BIAS_0, BIAS_1, TO_0, TO_1, BIAS_BYTES_0, BIAS_BYTES_1,
) = offsets(RequestWords)  # fmt: skip
HELD = 2  # in `fixed`, where 1 is for as long as something is read or used: for now
_ANY = 1 << 40  # numbers of an array whose length is not looked at


@simd.vector_intrinsic(types.CPointer(types.int64), types.int64)
def _int64_pointer(b, address):
    return b.inttoptr(address, I64.as_pointer())


@simd.vector_intrinsic(types.CPointer(types.float64), types.int64)
def _float64_pointer(b, address):
    return b.inttoptr(address, ir.DoubleType().as_pointer())


@simd.vector_intrinsic(types.CPointer(types.uint8), types.int64)
def _uint8_pointer(b, address):
    return b.inttoptr(address, I8.as_pointer())


@inner
def longs(words, field):
    """The int64 numbers whose address is in a field."""
    return carray(_int64_pointer(simd.peek_i64(words + field)), (_ANY,))


@inner
def flags(words, field):
    return carray(_uint8_pointer(simd.peek_i64(words + field)), (_ANY,))


@inner
def doubles(words, field):
    return carray(_float64_pointer(simd.peek_i64(words + field)), (_ANY,))


@inner
def rates(words):
    """The float64 numbers of the words themselves, from `accuracy` on."""
    return carray(_float64_pointer(words + ACCURACY), (4,))


@inner
def add(words, field, more):
    simd.poke_i64(words + field, simd.peek_i64(words + field) + more)


@inner
def append(some, value):
    some[0] += 1
    some[some[0]] = value


@inner
def has(some, value):
    at = some[0]
    while at > 0 and some[at] != value:
        at -= 1
    return at > 0


@inner
def left_of(words, slot):
    """How much of a slot's read has not come; what the queue does not read never does."""
    if flags(words, QUEUED)[slot] == 0:
        return 1
    queue = simd.peek_i64(words + QUEUE)
    return simd.atomic_load(read_queue.slot_words(queue, slot) + read_queue.LEFT)
