"""Requests for experts, by jobs: no Python runs between the layers of a pass.

What `memory.experts.ExpertCache` does for few experts, in the same memory: which of them are there,
what leaves for the others, what a `ReadQueue` reads, and which of the next layer's it reads ahead.
What only Python can do ends the list before the job.
"""

from __future__ import annotations

from qoff.kernels.cpu.jit import read_queue, simd
from qoff.kernels.cpu.jit.compiled import inner, job
from qoff.kernels.cpu.jit.futex import clock_ns
from qoff.kernels.cpu.jit.pool_threads import end_list, place, take

from .guesses import drop_wrong, judge, write_guesses
from .room import start
from .words import (
    ARRIVED,
    ASKED,
    AT,
    BIAS_0,
    BIAS_1,
    BIAS_BYTES_0,
    BIAS_BYTES_1,
    CACHE,
    CAME,
    CHOSEN,
    ENDED,
    FIRST,
    FIXED,
    FOLLOWING,
    GROWS,
    GUESS_IDS,
    HITS,
    IDS,
    LATE,
    LAYER,
    NEARLY_ALL,
    NOTED,
    NOTHING,
    NUM_LAYERS,
    NUMBER,
    PAIRS,
    PIECES,
    PLACES,
    QUEUE,
    QUEUED,
    REQUEST,
    RESOLVED,
    SHARES,
    SLOTS,
    TO_0,
    TO_1,
    UNREAD,
    UNTIL,
    WAITED,
    WHY,
    add,
    append,
    doubles,
    flags,
    has,
    left_of,
    longs,
    rates,
)

AGAIN, UNKNOWN, FAILED = range(3)  # why a list ended: time is over, Python has to read, or again


@inner
def _write_chosen(request, first):
    """The keys of what the pairs chose, ascending."""
    chosen, ids = longs(request, CHOSEN), longs(request, IDS)
    chosen[0] = 0
    for i in range(simd.peek_i64(request + PAIRS)):
        key = first + ids[i]
        if has(chosen, key):
            continue
        at = chosen[0] + 1
        while at > 1 and chosen[at - 1] > key:
            chosen[at] = chosen[at - 1]
            at -= 1
        chosen[at] = key
        chosen[0] += 1


@inner
def _is_known(words, request, chosen):
    """Whether the queue can read what is missing, and guesses need no Python."""
    slots, pieces = longs(words, SLOTS), longs(words, PIECES)
    came, queued = flags(words, CAME), flags(words, QUEUED)
    for i in range(1, chosen[0] + 1):
        slot = slots[chosen[i]]
        if slot < 0:
            if pieces[chosen[i]] <= 0:
                return False
        elif came[slot] == 0 and queued[slot] == 0:
            return False
    if simd.peek_i64(request + GUESS_IDS) == 0:
        return chosen[0] < simd.peek_i64(request + NEARLY_ALL)
    guesses = longs(request, GUESS_IDS)
    first = longs(words, FIRST)[simd.peek_i64(request + FOLLOWING)]
    for i in range(simd.peek_i64(request + PAIRS)):
        key = first + guesses[i]
        if slots[key] < 0 and pieces[key] <= 0:
            return False
    return True


@inner
def _use(words, layer, chosen):
    """Have the shares of a layer's experts age, and those of the chosen grow.

    Of many chosen ones when the pass is over: see `memory.experts.policy.NextUse`.
    """
    shares, first, age = doubles(words, SHARES), longs(words, FIRST), rates(words)[3]
    late, grows = flags(words, LATE), flags(words, GROWS)
    if layer <= simd.peek_i64(words + AT):
        for other in range(simd.peek_i64(words + NUM_LAYERS)):
            if late[other] == 0:
                continue
            for key in range(first[other], first[other + 1]):
                shares[key] *= 1 - age
                shares[key] += age * grows[key]
                grows[key] = 0
            late[other] = 0
    if 2 * chosen[0] < first[layer + 1] - first[layer]:
        for key in range(first[layer], first[layer + 1]):
            shares[key] *= 1 - age
        for i in range(1, chosen[0] + 1):
            shares[chosen[i]] += age
    else:
        late[layer] = 1
        for i in range(1, chosen[0] + 1):
            grows[chosen[i]] = 1
    simd.poke_i64(words + AT, layer)


@inner
def _end_before(pool, words, why):
    """End the list before the job at work."""
    simd.poke_i64(words + WHY, why)
    simd.atomic_store(words + ENDED, place(pool))
    end_list(pool)


@job
def ask_job(pool, thread, threads, request):
    """Begin to read what pairs have chosen, as the cache has not got it, and what they guess."""
    if take(pool, 0) > 0:
        return
    words, layer = simd.peek_i64(request + CACHE), simd.peek_i64(request + LAYER)
    queue, chosen = simd.peek_i64(words + QUEUE), longs(request, CHOSEN)
    simd.poke_i64(words + REQUEST, simd.peek_i64(request + NUMBER))
    _write_chosen(request, longs(words, FIRST)[layer])
    if simd.peek_i64(words + RESOLVED) != 0:
        return
    if simd.peek_i64(words + NOTED) == 0:
        if not _is_known(words, request, chosen):
            _end_before(pool, words, UNKNOWN)
            return
        judge(words, chosen)
        drop_wrong(words, chosen)
        _use(words, layer, chosen)
        write_guesses(words, request)
        append(longs(words, ASKED), simd.peek_i64(request + NUMBER))
        simd.poke_i64(words + NOTED, 1)
    came = simd.atomic_load(queue + read_queue.CAME)
    while start(words, chosen) == 0:  # what is being read may leave when it is there
        now = clock_ns()
        if now >= simd.peek_i64(words + UNTIL) or simd.atomic_load(queue + read_queue.STOP) != 0:
            _end_before(pool, words, AGAIN)
            return
        read_queue.sleep_until_more(queue, came, 1_000_000)
        came = simd.atomic_load(queue + read_queue.CAME)


@inner
def _are_there(words, chosen):
    slots, came = longs(words, SLOTS), flags(words, CAME)
    for i in range(1, chosen[0] + 1):
        slot = slots[chosen[i]]
        if came[slot] == 0 and left_of(words, slot) > 0:
            return False
    return True


@inner
def _take_in(words, request, chosen):
    """Count what is there, and what came, and write where the pairs find it; 0: some has failed."""
    slots, came, fixed = longs(words, SLOTS), flags(words, CAME), flags(words, FIXED)
    queue, hits = simd.peek_i64(words + QUEUE), 0
    for i in range(1, chosen[0] + 1):
        slot = slots[chosen[i]]
        if came[slot] == 0:
            if simd.atomic_load(read_queue.slot_words(queue, slot) + read_queue.FAILED) != 0:
                return 0
        else:
            hits += 1
    layer = simd.peek_i64(request + LAYER)
    for i in range(1, chosen[0] + 1):
        slot = slots[chosen[i]]
        if came[slot] == 0:
            longs(words, ARRIVED)[layer] = came[slot] = 1
        fixed[slot] = 1
        _bring_bias(
            request, BIAS_0, TO_0, BIAS_BYTES_0, chosen[i] - longs(words, FIRST)[layer], slot
        )
        _bring_bias(
            request, BIAS_1, TO_1, BIAS_BYTES_1, chosen[i] - longs(words, FIRST)[layer], slot
        )
    if simd.peek_i64(words + RESOLVED) == 0:
        add(words, HITS, hits)
    ids, places = longs(request, IDS), longs(request, PLACES)
    for i in range(simd.peek_i64(request + PAIRS)):
        places[i] = slots[longs(words, FIRST)[layer] + ids[i]]
    simd.poke_i64(words + NOTED, 0)
    simd.poke_i64(words + RESOLVED, 0)
    return 1


@inner
def _bring_bias(request, of, to, nbytes, number, slot):
    """Copy an expert's bias to where its slot has it."""
    source, size = simd.peek_i64(request + of), simd.peek_i64(request + nbytes)
    if source == 0:
        return
    goal = simd.peek_i64(request + to) + slot * size
    for at in range(0, size, 4):
        simd.poke_f32(goal + at, simd.peek_f32(source + number * size + at))


@job
def arrive_job(pool, thread, threads, request):
    """Wait until what was asked for is there, for the jobs that follow."""
    words, chosen = simd.peek_i64(request + CACHE), longs(request, CHOSEN)
    queue, until = simd.peek_i64(words + QUEUE), simd.peek_i64(words + UNTIL)
    first, start = take(pool, 0) == 0, clock_ns()
    now, came = start, simd.atomic_load(queue + read_queue.CAME)
    while not _are_there(words, chosen):
        if now >= until or simd.atomic_load(queue + read_queue.STOP) != 0:
            if first:
                _end_before(pool, words, AGAIN)
            return
        read_queue.sleep_until_more(queue, came, until - now)
        now, came = clock_ns(), simd.atomic_load(queue + read_queue.CAME)
    if first:
        add(words, WAITED, now - start)
        if _take_in(words, request, chosen) == 0:
            _end_before(pool, words, FAILED)


@job
def release_job(pool, thread, threads, request):
    """Give what a request has back; guesses that had no room are then read into what is free."""
    if take(pool, 0) > 0:
        return
    words, chosen = simd.peek_i64(request + CACHE), longs(request, CHOSEN)
    slots, fixed = longs(words, SLOTS), flags(words, FIXED)
    for i in range(1, chosen[0] + 1):
        fixed[slots[chosen[i]]] = 0
    if simd.peek_i64(words + UNREAD) != 0:
        start(words, longs(words, NOTHING))
