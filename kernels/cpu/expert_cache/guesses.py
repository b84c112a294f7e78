"""Which experts of the next layer are read ahead, and how often that was right."""

from __future__ import annotations

from qoff.kernels.cpu.jit import read_queue, simd
from qoff.kernels.cpu.jit.compiled import inner

from .room import leave
from .words import (
    BYTES,
    CAME,
    DOUBTFUL,
    FIRST,
    FOLLOWING,
    GUESS_IDS,
    GUESSED,
    GUESSES,
    LEAVING,
    MISSES,
    NUM_GUESSED,
    NUM_GUESSES,
    PAIRS,
    QUEUE,
    QUEUED,
    RIGHT,
    SIZES,
    SLOTS,
    WRONG,
    add,
    append,
    flags,
    has,
    longs,
    rates,
)


@inner
def judge(words, chosen):
    doubtful, right = longs(words, DOUBTFUL), 0
    if doubtful[0] == 0:
        return
    for i in range(1, doubtful[0] + 1):
        right += has(chosen, doubtful[i])
    of = rates(words)
    of[0] += of[1] * (right / doubtful[0] - of[0])
    add(words, RIGHT, right)
    doubtful[0] = 0


@inner
def drop_wrong(words, chosen):
    """Do not read the guesses that are known to be wrong and wait for their turn."""
    slots, guesses, came = longs(words, SLOTS), longs(words, GUESSES), flags(words, CAME)
    queued, guessed = flags(words, QUEUED), flags(words, GUESSED)
    leaving, queue, count, were_guessed = longs(words, LEAVING), simd.peek_i64(words + QUEUE), 0, 0
    for i in range(1, guesses[0] + 1):
        slot = slots[guesses[i]]
        if slot < 0 or came[slot] != 0 or queued[slot] == 0 or has(chosen, guesses[i]):
            continue
        if simd.peek_i64(read_queue.slot_words(queue, slot) + read_queue.BEGUN) > 0:
            continue
        leaving[count] = slot
        count += 1
        were_guessed += guessed[slot] != 0
        add(words, BYTES, -longs(words, SIZES)[guesses[i]])
    if count == 0:
        return
    read_queue.drop(queue, simd.peek_i64(words + LEAVING), count)
    for i in range(count):
        leave(words, leaving[i])
    add(words, NUM_GUESSED, -were_guessed)
    add(words, WRONG, -were_guessed)
    add(words, MISSES, were_guessed - count)


@inner
def write_guesses(words, request):
    """The keys of what the pairs guess, those of most pairs first, else in their order."""
    guesses, doubtful, slots = longs(words, GUESSES), longs(words, DOUBTFUL), longs(words, SLOTS)
    guesses[0] = doubtful[0] = 0
    if simd.peek_i64(request + GUESS_IDS) == 0:
        return
    ids, pairs = longs(request, GUESS_IDS), simd.peek_i64(request + PAIRS)
    first = longs(words, FIRST)[simd.peek_i64(request + FOLLOWING)]
    for votes in range(pairs, 0, -1):
        for i in range(pairs):
            found, before = 0, 0
            for j in range(pairs):
                found += ids[j] == ids[i]
                before += j < i and ids[j] == ids[i]
            if found == votes and before == 0:
                append(guesses, first + ids[i])
                if slots[first + ids[i]] < 0:
                    append(doubtful, first + ids[i])
    add(words, NUM_GUESSES, doubtful[0])
