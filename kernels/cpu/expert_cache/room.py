"""What leaves a cache of experts, and what is read into its slots."""

from __future__ import annotations

from qoff.kernels.cpu.jit import read_queue, simd
from qoff.kernels.cpu.jit.compiled import inner

from .words import (
    AT,
    BYTES,
    CAME,
    CHUNKS,
    COUNT,
    FILES,
    FIXED,
    FREE,
    GUESSED,
    GUESSES,
    HELD,
    KEYS,
    LAYERS,
    LEAVING,
    MEMORY,
    MISSES,
    NUM_GUESSED,
    NUM_LAYERS,
    OFFSETS,
    PIECES,
    QUEUE,
    QUEUE_KEYS,
    QUEUED,
    RANKS,
    READING,
    SHARES,
    SIZES,
    SLOTS,
    SPOILED,
    STRIDE,
    UNREAD,
    WORTHS,
    WRONG,
    add,
    append,
    doubles,
    flags,
    has,
    left_of,
    longs,
    rates,
)


@inner
def leave(words, slot):
    """What is in a slot leaves it."""
    slots, keys, free = longs(words, SLOTS), longs(words, KEYS), longs(words, FREE)
    came, queued = flags(words, CAME), flags(words, QUEUED)
    if came[slot] == 0:
        _settle(words, slot)
        if flags(words, GUESSED)[slot] != 0:
            add(words, WRONG, 1)
        reading, kept = longs(words, READING), 0
        for i in range(1, reading[0] + 1):
            if reading[i] != slot:
                kept += 1
                reading[kept] = reading[i]
        reading[0] = kept
    slots[keys[slot]] = -1
    keys[slot] = -1
    flags(words, FIXED)[slot] = 0
    queued[slot] = 0
    memory = simd.peek_i64(words + MEMORY) + slot * simd.peek_i64(words + STRIDE)
    for at in range(0, simd.peek_i64(words + SPOILED), 8):
        simd.poke_i64(memory + at, -1)
    append(free, slot)


@inner
def _settle(words, slot):
    """Wait until nothing is written to a slot."""
    queue = simd.peek_i64(words + QUEUE)
    came = simd.atomic_load(queue + read_queue.CAME)
    while left_of(words, slot) > 0 and simd.atomic_load(queue + read_queue.STOP) == 0:
        read_queue.sleep_until_more(queue, came, 1_000_000)
        came = simd.atomic_load(queue + read_queue.CAME)


@inner
def _unfix(words):
    """Let leave what has been read, also where the pass that asked for it does so no more."""
    reading, kept = longs(words, READING), 0
    came, fixed = flags(words, CAME), flags(words, FIXED)
    for i in range(1, reading[0] + 1):
        slot = reading[i]
        if came[slot] == 0 and left_of(words, slot) > 0:
            kept += 1
            reading[kept] = slot
        elif came[slot] == 0:
            fixed[slot] &= HELD  # else who has asked for it has it
    reading[0] = kept


@inner
def hold(words, keys, holds):
    """Have slots of keys not leave for now, or no more."""
    slots, fixed = longs(words, SLOTS), flags(words, FIXED)
    for i in range(1, keys[0] + 1):
        slot = slots[keys[i]]
        if slot >= 0:
            fixed[slot] = (fixed[slot] & ~HELD) | (HELD if holds else 0)


@inner
def make_room(words, count):
    """Have `count` slots free, as far as no slot is fixed: those of least worth leave first."""
    count = min(count - longs(words, FREE)[0], simd.peek_i64(words + COUNT))
    if count <= 0:
        return
    _unfix(words)
    keys, layers, fixed = longs(words, KEYS), longs(words, LAYERS), flags(words, FIXED)
    shares, ranks = doubles(words, SHARES), doubles(words, RANKS)
    worths = doubles(words, WORTHS)
    leaving = longs(words, LEAVING)
    at, num_layers, found = simd.peek_i64(words + AT), simd.peek_i64(words + NUM_LAYERS), 0
    for slot in range(simd.peek_i64(words + COUNT)):
        key = keys[slot]
        if key < 0 or fixed[slot] != 0:
            continue
        turns = (layers[key] - at - 1) % num_layers / num_layers
        worth = -((turns + 3 * ranks[key]) / 4 + 1 / shares[key])
        if found == count and worth >= worths[found - 1]:
            continue
        place = min(found, count - 1)
        while place > 0 and worths[place - 1] > worth:
            worths[place], leaving[place] = worths[place - 1], leaving[place - 1]
            place -= 1
        worths[place], leaving[place] = worth, slot
        found = min(found + 1, count)
    for i in range(found):
        leave(words, leaving[i])


@inner
def _read(words, key, guess):
    """Take the first free slot for an expert, and say what is to be read; the slot."""
    free, slots = longs(words, FREE), longs(words, SLOTS)
    slot = free[1]
    for i in range(1, free[0]):
        free[i] = free[i + 1]
    free[0] -= 1
    slots[key] = slot
    longs(words, KEYS)[slot] = longs(words, QUEUE_KEYS)[slot] = key
    flags(words, GUESSED)[slot] = guess
    flags(words, CAME)[slot] = 0
    flags(words, QUEUED)[slot] = flags(words, FIXED)[slot] = 1
    append(longs(words, READING), slot)
    add(words, BYTES, longs(words, SIZES)[key])
    add(words, NUM_GUESSED if guess else MISSES, 1)
    layer, pieces = longs(words, LAYERS)[key], longs(words, PIECES)[key]
    file, offset = longs(words, FILES)[layer], longs(words, OFFSETS)[key]
    memory = simd.peek_i64(words + MEMORY) + slot * simd.peek_i64(words + STRIDE)
    some = longs(words, CHUNKS)[key]
    queue = simd.peek_i64(words + QUEUE)
    for i in range(pieces):
        piece = some + 32 * i
        read_queue.set_chunk(
            queue,
            slot,
            i,
            file,
            simd.peek_i64(piece) + offset,
            simd.peek_i64(piece + 8) + memory,
            simd.peek_i64(piece + 16),
            simd.peek_i64(piece + 24),
        )
    simd.poke_i64(read_queue.slot_words(queue, slot) + read_queue.COUNT, pieces)
    return slot


@inner
def start(words, chosen):
    """Read what is chosen and not under way, and guesses, as there is room; 0: not all of it."""
    slots, came, queue = longs(words, SLOTS), flags(words, CAME), simd.peek_i64(words + QUEUE)
    leaving, coming, missing = longs(words, LEAVING), 0, 0
    for i in range(1, chosen[0] + 1):
        slot = slots[chosen[i]]
        if slot < 0:
            missing += 1
        elif came[slot] == 0:
            leaving[coming] = slot
            coming += 1
    if coming > 0:
        read_queue.hurry(queue, simd.peek_i64(words + LEAVING), coming)
    guesses, guessed, of = longs(words, GUESSES), 0, rates(words)
    if of[0] >= of[2]:
        for i in range(1, guesses[0] + 1):
            guessed += slots[guesses[i]] < 0 and not has(chosen, guesses[i])
    simd.poke_i64(words + UNREAD, 0)
    total = missing + guessed
    if total == 0:
        return 1
    free = longs(words, FREE)
    hold(words, guesses, True)
    hold(words, chosen, True)
    make_room(words, total)
    hold(words, guesses, False)
    if free[0] < missing:
        make_room(words, missing)
        guessed = 0
    hold(words, chosen, False)
    if free[0] < missing:
        return 0
    simd.poke_i64(words + UNREAD, free[0] < total)
    count, urgent = 0, missing
    for i in range(1, chosen[0] + 1):
        if slots[chosen[i]] < 0:
            leaving[count] = _read(words, chosen[i], 0)
            count += 1
    for i in range(1, guesses[0] + 1):
        if guessed > 0 and free[0] > 0 and slots[guesses[i]] < 0:
            leaving[count] = _read(words, guesses[i], 1)
            count += 1
    if count > 0:
        read_queue.ask_for(queue, simd.peek_i64(words + LEAVING), count, urgent)
    return 1
