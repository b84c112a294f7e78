"""Reading files into slots by threads that run compiled code, as it is asked for: the urgent first.

Each thread takes a chunk of what was asked for first, of what is urgent before the rest. What a
chunk does not give at once fails its slot, and is left to Python, which knows what to do or say.
"""

from __future__ import annotations

import ctypes
from typing import Any, TypeAlias

import numpy as np
from numba import types
from numpy.typing import NDArray

from qoff.kernels.cpu.operands import int64s, offsets

from . import simd
from .compiled import inner, job
from .futex import clock_ns, sleep_for, wake
from .reads import BusyWords, count_reads, read_at

_sched_yield = types.ExternalFunction("sched_yield", types.int32())

Slots: TypeAlias = NDArray[np.int64]


class _Queue(ctypes.Structure):
    """What all threads look at; the last fields are addresses of arrays.

    asked: how often something was asked for. came: how many slots have been filled. sleeping,
    waiting: threads that sleep until one or the other changes. waits: how many slots are not all
    begun; their numbers lie in `order`.
    """

    _fields_ = int64s(
        "lock", "stop", "asked", "sleeping", "came", "waiting", "waits", "turn", "chunks_of_slot",
        "slots", "chunks", "order", "busy",
    )  # fmt: skip


class _Slot(ctypes.Structure):
    """left: chunks that have not come. begun, count: of those that it has. turn: whose is first."""

    _fields_ = int64s("left", "begun", "count", "turn", "failed")


class _Chunk(ctypes.Structure):
    """A read of `wanted` bytes, for which up to `asked` may be written."""

    _fields_ = int64s("file", "offset", "address", "wanted", "asked")


_FIELDS = offsets(_Queue)
LOCK, STOP, ASKED_FOR, SLEEPING, CAME, WAITING, WAITS, TURN, EACH, SLOTS, CHUNKS, ORDER, BUSY = (
    _FIELDS
)
LEFT, BEGUN, COUNT, SLOT_TURN, FAILED = offsets(_Slot)
FILE, OFFSET, ADDRESS, WANTED, ASKED = offsets(_Chunk)
_SLOT_BYTES, _CHUNK_BYTES = ctypes.sizeof(_Slot), ctypes.sizeof(_Chunk)
_LOOK_NS = 100_000_000  # how often who sleeps looks whether there is something else
_LATER = 1 << 40  # turns of what is not urgent


@inner
def _lock(queue):
    while simd.compare_and_swap(queue + LOCK, 0, 1) == 0:
        _sched_yield()


@inner
def _unlock(queue):
    simd.atomic_store(queue + LOCK, 0)


@inner
def slot_words(queue, slot):
    """Address of what is known of a slot."""
    return simd.peek_i64(queue + SLOTS) + slot * _SLOT_BYTES


@inner
def set_chunk(queue, slot, number, file, offset, address, wanted, asked):
    """Say what a chunk of a slot that is not under way is."""
    number += slot * simd.peek_i64(queue + EACH)
    chunk = simd.peek_i64(queue + CHUNKS) + number * _CHUNK_BYTES
    simd.poke_i64(chunk + FILE, file)
    simd.poke_i64(chunk + OFFSET, offset)
    simd.poke_i64(chunk + ADDRESS, address)
    simd.poke_i64(chunk + WANTED, wanted)
    simd.poke_i64(chunk + ASKED, asked)


@inner
def _first(queue):
    """The place in the order of the slot whose turn it is, -1 for none."""
    order, found, least = simd.peek_i64(queue + ORDER), -1, 0
    for place in range(simd.peek_i64(queue + WAITS)):
        slot = simd.peek_i64(order + 8 * place)
        turn = simd.peek_i64(slot_words(queue, slot) + SLOT_TURN)
        if found < 0 or turn < least:
            found, least = place, turn
    return found


@inner
def _remove(queue, place):
    order, last = simd.peek_i64(queue + ORDER), simd.peek_i64(queue + WAITS) - 1
    simd.poke_i64(order + 8 * place, simd.peek_i64(order + 8 * last))
    simd.poke_i64(queue + WAITS, last)


@inner
def _has_come(queue, words, chunks):
    """So many chunks of a slot are done with; the last of them wakes who waits."""
    if simd.atomic_add(words + LEFT, -chunks) == chunks:
        simd.atomic_add(queue + CAME, 1)
        if simd.atomic_load(queue + WAITING) > 0:
            wake(queue + CAME)


@inner
def _take(queue):
    """The address of the next chunk's slot, and of the chunk; zeros for none."""
    _lock(queue)
    place = _first(queue)
    if place < 0:
        _unlock(queue)
        return 0, 0
    slot = simd.peek_i64(simd.peek_i64(queue + ORDER) + 8 * place)
    words = slot_words(queue, slot)
    begun = simd.peek_i64(words + BEGUN)
    simd.poke_i64(words + BEGUN, begun + 1)
    if begun + 1 == simd.peek_i64(words + COUNT):
        _remove(queue, place)
    _unlock(queue)
    number = slot * simd.peek_i64(queue + EACH) + begun
    return words, simd.peek_i64(queue + CHUNKS) + number * _CHUNK_BYTES


@job
def _serve(queue, _thread, _threads, _args):
    """Read what is asked for until the queue is stopped."""
    busy = simd.peek_i64(queue + BUSY)
    while simd.atomic_load(queue + STOP) == 0:
        asked = simd.atomic_load(queue + ASKED_FOR)
        words, chunk = _take(queue)
        if words == 0:
            simd.atomic_add(queue + SLEEPING, 1)
            sleep_for(queue + ASKED_FOR, asked, _LOOK_NS)
            simd.atomic_add(queue + SLEEPING, -1)
            continue
        wanted = simd.peek_i64(chunk + WANTED)
        count_reads(busy, 1, 0)
        got = read_at(
            simd.peek_i64(chunk + FILE),
            simd.peek_i64(chunk + OFFSET),
            simd.peek_i64(chunk + ADDRESS),
            wanted,
            simd.peek_i64(chunk + ASKED),
        )
        count_reads(busy, -1, got if got == wanted else 0)
        if got != wanted:
            simd.atomic_store(words + FAILED, 1)
        _has_come(queue, words, 1)


@inner
def ask_for(queue, slots, count, urgent):
    """Ask for slots in this order; all but the first `urgent` behind all that are."""
    _lock(queue)
    order, waits = simd.peek_i64(queue + ORDER), simd.peek_i64(queue + WAITS)
    turn = simd.peek_i64(queue + TURN)
    for i in range(count):
        slot = simd.peek_i64(slots + 8 * i)
        words = slot_words(queue, slot)
        simd.poke_i64(words + BEGUN, 0)
        simd.poke_i64(words + FAILED, 0)
        simd.poke_i64(words + SLOT_TURN, turn + i + (0 if i < urgent else _LATER))
        simd.atomic_store(words + LEFT, simd.peek_i64(words + COUNT))
        simd.poke_i64(order + 8 * (waits + i), slot)
    simd.poke_i64(queue + TURN, turn + count)
    simd.poke_i64(queue + WAITS, waits + count)
    _unlock(queue)
    simd.atomic_add(queue + ASKED_FOR, 1)
    if simd.atomic_load(queue + SLEEPING) > 0:
        wake(queue + ASKED_FOR)


@job
def _ask(queue, slots, count, urgent):
    ask_for(queue, slots, count, urgent)


@inner
def hurry(queue, slots, count):
    """Have what is left of slots, which are under way, be urgent from now on, in this order."""
    _lock(queue)
    turn = simd.peek_i64(queue + TURN)
    for i in range(count):
        words = slot_words(queue, simd.peek_i64(slots + 8 * i))
        if simd.peek_i64(words + SLOT_TURN) >= _LATER:
            simd.poke_i64(words + SLOT_TURN, turn + i)
    simd.poke_i64(queue + TURN, turn + count)
    _unlock(queue)


@job
def _hurry(queue, slots, count, _args):
    hurry(queue, slots, count)


@inner
def drop(queue, slots, count):
    """Begin no further chunk of slots, which then have failed."""
    _lock(queue)
    order = simd.peek_i64(queue + ORDER)
    for i in range(count):
        slot = simd.peek_i64(slots + 8 * i)
        for place in range(simd.peek_i64(queue + WAITS)):
            if simd.peek_i64(order + 8 * place) == slot:
                _remove(queue, place)
                words = slot_words(queue, slot)
                left = simd.peek_i64(words + COUNT) - simd.peek_i64(words + BEGUN)
                simd.atomic_store(words + FAILED, 1)
                _has_come(queue, words, left)
                break
    _unlock(queue)


@job
def _drop(queue, slots, count, _args):
    drop(queue, slots, count)


@inner
def sleep_until_more(queue, came, nanoseconds):
    """Sleep until more has come than `came`, as it was before the caller looked for what it needs.

    So many nanoseconds at most; may return without a reason.
    """
    simd.atomic_add(queue + WAITING, 1)
    sleep_for(queue + CAME, came, nanoseconds)
    simd.atomic_add(queue + WAITING, -1)


@job
def _wait(queue, slots, count, _args):
    """Sleep until slots have come, the queue is stopped or some time has passed."""
    until = clock_ns() + _LOOK_NS
    for i in range(count):
        words = slot_words(queue, simd.peek_i64(slots + 8 * i))
        came = simd.atomic_load(queue + CAME)
        while simd.atomic_load(words + LEFT) > 0:
            now = clock_ns()
            if now >= until or simd.atomic_load(queue + STOP) != 0:
                return
            sleep_until_more(queue, came, until - now)
            came = simd.atomic_load(queue + CAME)


@job
def _stop(queue, _thread, _threads, _args):
    simd.atomic_store(queue + STOP, 1)
    wake(queue + ASKED_FOR)
    wake(queue + CAME)


_Native = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)


class ReadQueue:
    """Chunks of slots, which all threads read that call `serve`: up to `each` chunks of a slot.

    busy: `BusyWords`, which stay where they are. Arrays are of slots, int64. All but `serve` and
    `stop` is for one thread.
    """

    def __init__(self, slots: int, each: int, busy: BusyWords) -> None:
        self._slots = np.zeros((slots, len(_Slot._fields_)), dtype=np.int64)
        self._chunks = np.zeros((slots, each, len(_Chunk._fields_)), dtype=np.int64)
        self._order = np.zeros(slots, dtype=np.int64)
        self._busy = busy
        self._words = _Queue(
            chunks_of_slot=each,
            slots=self._slots.ctypes.data,
            chunks=self._chunks.ctypes.data,
            order=self._order.ctypes.data,
            busy=ctypes.addressof(busy),
        )
        self.address = ctypes.addressof(self._words)
        self._left = self._slots[:, LEFT // 8]
        self._count = self._slots[:, COUNT // 8]
        self._begun = self._slots[:, BEGUN // 8]
        self._failed = self._slots[:, FAILED // 8]

    def serve(self) -> None:
        """Read what is asked for, until the queue is stopped; for any number of threads."""
        _Native(_serve.address)(self.address, 0, 0, 0)

    @property
    def stopped(self) -> bool:
        """Whether nothing is read any more."""
        return bool(self._words.stop)

    def ask(self, slots: Slots, chunks: Slots, counts: Slots, urgent: int) -> None:
        """Begin to read chunks into slots that are not under way, in this order.

        chunks: int64 [slots, each, 5], of each its file's descriptor, the offset there, an address,
        and bytes that are wanted, and asked for. counts: chunks of each slot, at least one. urgent:
        the first so many slots come before all others that are not.
        """
        slots = np.ascontiguousarray(slots)
        self._chunks[slots] = chunks
        self._count[slots] = counts
        self._run(_ask, slots, urgent)

    def fail(self, slots: Slots) -> None:
        """Slots that are not under way have failed, until they are asked for again."""
        self._failed[slots] = 1

    def hurry(self, slots: Slots) -> None:
        """Have what is under way be read before what is not urgent."""
        self._run(_hurry, slots)

    def drop(self, slots: Slots) -> None:
        """Read no further chunk of slots; those of which some are missing have failed."""
        self._run(_drop, slots)

    def done(self, slots: Slots) -> NDArray[np.bool_]:
        """Which are under way no more."""
        found: NDArray[np.bool_] = self._left[slots] <= 0
        return found

    def begun(self, slots: Slots) -> NDArray[np.bool_]:
        """Of which something was read, or is being."""
        found: NDArray[np.bool_] = self._begun[slots] > 0
        return found

    def failed(self, slots: Slots) -> NDArray[np.bool_]:
        """Of which something did not come."""
        found: NDArray[np.bool_] = self._failed[slots] != 0
        return found

    def dropped(self, slot: int) -> bool:
        """Whether something of a slot that failed was not tried."""
        return bool(self._begun[slot] < self._count[slot])

    def wait(self, slots: Slots) -> None:
        """Sleep until all are done, the queue is stopped, or a moment has passed."""
        self._run(_wait, slots)

    def stop(self) -> None:
        """Begin no further chunk, and wake all threads."""
        _Native(_stop.address)(self.address, 0, 0, 0)

    def _run(self, function: Any, slots: Slots, more: int = 0) -> None:
        slots = np.ascontiguousarray(slots)
        if len(slots):
            _Native(function.address)(self.address, slots.ctypes.data, len(slots), more)
