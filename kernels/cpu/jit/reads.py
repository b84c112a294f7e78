"""Reading files into slots by threads that run compiled code: chunks of a list, as slots get free.

What goes to a slot is read when all before it is there, though there may be room: disks share their
rate among the reads under way, and virtual ones tell of none before they have done all of them.
What a chunk does not give at once is left to Python, which knows what to do or say about it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

from numba import types

from qoff.kernels.cpu.operands import int64s, offsets

from . import simd
from .compiled import inner, job
from .futex import clock_ns, sleep_for
from .slots import filled, is_free

_i64 = types.int64
_pread = types.ExternalFunction("pread", _i64(_i64, _i64, _i64, _i64))
_sched_yield = types.ExternalFunction("sched_yield", types.int32())


class BusyWords(ctypes.Structure):
    """What threads have read: bytes, nanoseconds in which at least one did; the rest is theirs."""

    _fields_ = int64s("nbytes", "ns", "lock", "reading", "since")


class _Chunk(ctypes.Structure):
    """A read of `wanted` bytes, and of up to `asked` where the file has them, and of which fill."""

    _fields_ = int64s("file", "offset", "address", "wanted", "asked", "fill")


class _Fill(ctypes.Structure):
    """What is read into a slot: chunks that are left; address of the slot's words; its turn.

    turn: how often the slot has to have been given back before. before: address of the fill that
    is to be there first, 0 for none.
    """

    _fields_ = int64s("left", "slot", "turn", "before")


class _List(ctypes.Structure):
    _fields_ = int64s("next", "count", "stop", "chunks", "fills", "busy")


NBYTES, NS, LOCK, READING, SINCE = offsets(BusyWords)
FILE, OFFSET, ADDRESS, WANTED, ASKED, FILL = offsets(_Chunk)
LEFT, SLOT, TURN, BEFORE = offsets(_Fill)
NEXT, COUNT, STOP, CHUNKS, FILLS, BUSY = offsets(_List)
_LOOK_NS = 100_000_000  # how often who waits looks whether the list was stopped
_CHUNK_BYTES, _FILL_BYTES = ctypes.sizeof(_Chunk), ctypes.sizeof(_Fill)


@inner
def count_reads(busy, reading, nbytes):
    """One thread more or less reads; of the bytes it has read."""
    while simd.compare_and_swap(busy + LOCK, 0, 1) == 0:
        _sched_yield()
    now, before = clock_ns(), simd.peek_i64(busy + READING)
    if before > 0:
        simd.poke_i64(busy + NS, simd.peek_i64(busy + NS) + now - simd.peek_i64(busy + SINCE))
    simd.poke_i64(busy + SINCE, now)
    simd.poke_i64(busy + READING, before + reading)
    simd.poke_i64(busy + NBYTES, simd.peek_i64(busy + NBYTES) + nbytes)
    simd.atomic_store(busy + LOCK, 0)


@inner
def read_at(file, offset, address, wanted, asked):
    """Read bytes of a file, and up to `asked` where it has them; how many of the wanted came."""
    got = 0
    while got < wanted:
        count = _pread(file, address + got, asked - got, offset + got)
        if count <= 0:
            break
        got += count
    return min(got, wanted)


@inner
def _read(chunk):
    """Read a chunk; how many bytes came."""
    return read_at(
        simd.peek_i64(chunk + FILE),
        simd.peek_i64(chunk + OFFSET),
        simd.peek_i64(chunk + ADDRESS),
        simd.peek_i64(chunk + WANTED),
        simd.peek_i64(chunk + ASKED),
    )


@inner
def _is_there(fill):
    """Whether all chunks of a slot are read; sleeps for a moment where they are not."""
    slot = simd.peek_i64(fill + SLOT)
    count = simd.atomic_load(slot)
    if simd.atomic_load(fill + LEFT) > 0:
        sleep_for(slot, count, _LOOK_NS)
    return simd.atomic_load(fill + LEFT) <= 0


@job
def _chunk_done(reads, number, _thread, _args):
    """A chunk is read; the last of a slot says that this is filled."""
    chunk = simd.peek_i64(reads + CHUNKS) + number * _CHUNK_BYTES
    fill = simd.peek_i64(reads + FILLS) + simd.peek_i64(chunk + FILL) * _FILL_BYTES
    if simd.atomic_add(fill + LEFT, -1) == 1:
        filled(simd.peek_i64(fill + SLOT))


@job
def _read_chunks(reads, failed, _thread, _args):
    """Read chunks until there are no more, or one is Python's: its number (or -1) to `failed`."""
    simd.poke_i64(failed, -1)
    busy = simd.peek_i64(reads + BUSY)
    while True:
        number = simd.atomic_add(reads + NEXT, 1)
        if number >= simd.peek_i64(reads + COUNT):
            return
        chunk = simd.peek_i64(reads + CHUNKS) + number * _CHUNK_BYTES
        fill = simd.peek_i64(reads + FILLS) + simd.peek_i64(chunk + FILL) * _FILL_BYTES
        slot, turn = simd.peek_i64(fill + SLOT), simd.peek_i64(fill + TURN)
        before = simd.peek_i64(fill + BEFORE)
        while before != 0 and simd.atomic_load(reads + STOP) == 0 and not _is_there(before):
            pass
        while simd.atomic_load(reads + STOP) == 0 and not is_free(slot, turn):
            pass
        if simd.atomic_load(reads + STOP) != 0:
            return
        if simd.peek_i64(chunk + FILE) < 0:
            simd.poke_i64(failed, number)
            return
        count_reads(busy, 1, 0)
        got = _read(chunk)
        whole = got == simd.peek_i64(chunk + WANTED)
        count_reads(busy, -1, got if whole else 0)
        if not whole:
            simd.poke_i64(failed, number)
            return
        if simd.atomic_add(fill + LEFT, -1) == 1:
            filled(slot)


_Native = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)


class Chunk(NamedTuple):
    """A read of `wanted` bytes, for which `asked` may be written; file: a descriptor, or -1.

    fill: index of what it is a part of.
    """

    file: int
    offset: int
    address: int
    wanted: int
    asked: int
    fill: int


class ReadList:
    """Chunks to be read once, one fill after another, by all threads that call `read`.

    slots: of each fill the address of the slot's words, and how often it has to have been given
    back before. busy: `BusyWords`, which stay where they are.
    """

    def __init__(
        self, chunks: Sequence[Chunk], slots: Sequence[tuple[int, int]], busy: BusyWords
    ) -> None:
        left = [0] * len(slots)
        for chunk in chunks:
            left[chunk.fill] += 1
        self._chunks = (_Chunk * len(chunks))(*(_Chunk(*chunk) for chunk in chunks))
        self._fills = (_Fill * len(slots))()
        first = ctypes.addressof(self._fills)
        for i, (count, (words, turn)) in enumerate(zip(left, slots, strict=True)):
            before = first + (i - 1) * _FILL_BYTES if i else 0
            self._fills[i] = _Fill(count, words, turn, before)
        self._busy = busy
        self._words = _List(
            0, len(chunks), 0, ctypes.addressof(self._chunks), ctypes.addressof(self._fills),
            ctypes.addressof(busy),
        )  # fmt: skip
        self._address = ctypes.addressof(self._words)

    def read(self) -> int | None:
        """Read chunks, as long as there are some: None, or the number of one that Python has to."""
        failed = ctypes.c_int64()
        _Native(_read_chunks.address)(self._address, ctypes.addressof(failed), 0, 0)
        return None if failed.value < 0 else failed.value

    def done(self, number: int) -> None:
        """A chunk was read by Python."""
        _Native(_chunk_done.address)(self._address, number, 0, 0)

    def stop(self) -> None:
        """Begin no further chunk."""
        self._words.stop = 1

    @property
    def stopped(self) -> bool:
        """Whether chunks may be missing."""
        return bool(self._words.stop)
