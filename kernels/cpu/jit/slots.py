"""Slots of memory that other threads fill while jobs of a pool use what is in them.

Two words of each slot count how often it was filled and how often it was given back. A job waits
until its slot has been filled once more than given back, and another job gives it back; who fills
it waits for that. A list of jobs ends before the job that waits when its time is over, so that
Python hears signals and goes on from there, or when filling has failed.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from qoff.interrupts import HEARD_S
from qoff.kernels.cpu.operands import int64s, offsets

from . import simd
from .compiled import inner, job
from .futex import clock_ns, sleep_for, wake
from .pool import default_pool
from .pool_threads import end_list, place, take
from .recorder import JobReplay

_LINE = 128
_UNTIL, _FAILED, _ENDED, _WAITED, _FIRST = (_LINE * i for i in range(5))
_SLOT_BYTES, _USED = 2 * _LINE, _LINE  # of a slot: how often it was filled, and then given back
_SPINS = 200  # a few microseconds: who fills needs the core


class SlotArguments(ctypes.Structure):
    """Addresses of all slots' words and of one's, 0 for none; of its memory, and bytes to spoil."""

    _fields_ = int64s("slots", "slot", "memory", "spoiled")


SLOTS, SLOT, MEMORY, SPOILED = offsets(SlotArguments)


@inner
def _is_filled(slot):
    return simd.atomic_load(slot) > simd.atomic_load(slot + _USED)


@inner
def _end_before(pool, slots):
    """End the list before the job at work."""
    simd.atomic_store(slots + _ENDED, place(pool))
    end_list(pool)


@job
def wait_job(pool, thread, threads, args):
    """Wait until a slot is filled; what is in it is then visible."""
    slots, slot = simd.peek_i64(args + SLOTS), simd.peek_i64(args + SLOT)
    first = take(pool, 0) == 0
    start = now = clock_ns()
    until = simd.peek_i64(slots + _UNTIL)
    spins = 0
    while slot != 0 and not _is_filled(slot) and now < until:
        if simd.atomic_load(slots + _FAILED) != 0:
            break
        spins += 1
        if spins < _SPINS:
            simd.spin_pause()
        else:
            sleep_for(slot, simd.atomic_load(slot + _USED), until - now)
        now = clock_ns()
    if first:
        simd.poke_i64(slots + _WAITED, simd.peek_i64(slots + _WAITED) + now - start)
    if now >= until or simd.atomic_load(slots + _FAILED) != 0:
        _end_before(pool, slots)


@job
def give_back_job(pool, thread, threads, args):
    """Give a slot back; what is in it is spoiled, if that is asked for."""
    if take(pool, 0) > 0:
        return
    memory, slot = simd.peek_i64(args + MEMORY), simd.peek_i64(args + SLOT)
    for at in range(0, simd.peek_i64(args + SPOILED), 8):
        simd.poke_i64(memory + at, -1)
    simd.atomic_add(slot + _USED, 1)
    wake(slot + _USED)


@inner
def filled(slot):
    """Say that a slot has been filled."""
    simd.atomic_add(slot, 1)
    wake(slot)


@job
def fill_job(pool, thread, threads, args):
    """Say that a slot is filled, by the jobs that follow."""
    if take(pool, 0) == 0:
        filled(simd.peek_i64(args + SLOT))


@inner
def is_free(slot, count):
    """Whether a slot has been given back so many times; sleeps for a moment where it has not."""
    used = simd.atomic_load(slot + _USED)
    if used < count:
        sleep_for(slot + _USED, used, 100_000_000)
        used = simd.atomic_load(slot + _USED)
    return used >= count


@job
def _fail(slots, count, value, _):
    """Say whether filling has failed, to all who wait for one of so many slots."""
    simd.atomic_store(slots + _FAILED, value)
    for i in range(count):
        wake(slots + _FIRST + i * _SLOT_BYTES)
        wake(slots + _FIRST + i * _SLOT_BYTES + _USED)


_Native = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)


class Slots:
    """The words of some slots, whose memory lies at `addresses`, `nbytes` of each.

    spoil: fill what is given back with 0xFF.
    """

    def __init__(self, addresses: Sequence[int], nbytes: int, spoil: bool) -> None:
        self._addresses, self._spoiled = addresses, nbytes // 8 * 8 if spoil else 0
        self._memory = (ctypes.c_byte * (_FIRST + len(addresses) * _SLOT_BYTES + _LINE))()
        self._address = -(-ctypes.addressof(self._memory) // _LINE) * _LINE
        self._error: BaseException | None = None

    def words(self, slot: int) -> int:
        """Address of a slot's words."""
        return self._address + _FIRST + slot * _SLOT_BYTES

    def used(self, slot: int) -> int:
        """How often a slot was given back."""
        return self._word(self.words(slot) - self._address + _USED).value

    def set_filled(self, slot: int) -> None:
        """Say that what is in a slot came in another way."""
        self._word(self.words(slot) - self._address).value = self.used(slot) + 1

    @property
    def failed(self) -> bool:
        """Whether lists that wait end with an error."""
        return self._error is not None

    def begin(self) -> None:
        """Forget what failed. Nothing may be filling a slot."""
        if self._error is not None:
            self._error = None
            self._tell(0)

    def fail(self, error: BaseException) -> None:
        """End lists that wait, with this error unless there is one."""
        self._error = self._error or error
        self._tell(1)

    def waited_s(self) -> float:
        """Seconds that jobs have waited since the last call."""
        word = self._word(_WAITED)
        seconds, word.value = word.value * 1e-9, 0
        return seconds

    def wait(self, slot: int | None) -> None:
        """Wait, by a job, until a slot is filled; None: for nothing, but signals may be heard.

        Raises what failed.
        """
        args = SlotArguments(self._address, 0 if slot is None else self.words(slot))
        pool = default_pool()
        with pool.lock:
            while (
                run_for_a_while([self], partial(pool.run, wait_job.address, args, self)) is not None
            ):
                pass

    def fill(self, slot: int) -> None:
        """Say, by a job, that a slot is filled: the jobs that follow do it. It has to be free."""
        args = SlotArguments(self._address, self.words(slot))
        default_pool().run(fill_job.address, args, self)

    def give_back(self, slot: int) -> None:
        """Give a slot back by a job."""
        memory, words = self._addresses[slot], self.words(slot)
        args = SlotArguments(self._address, words, memory, self._spoiled)
        default_pool().run(give_back_job.address, args, self)

    def arm(self, until_ns: int) -> None:
        """Let jobs wait until this time; nothing has ended a list so far."""
        self._word(_ENDED).value = -1
        self._word(_UNTIL).value = until_ns

    def ended(self) -> int | None:
        """Where in its list the job is that waited in vain, if one did. Raises what failed."""
        if self._error is not None:
            raise self._error
        at = self._word(_ENDED).value
        return None if at < 0 else at

    def _tell(self, failed: int) -> None:
        _Native(_fail.address)(self._address, len(self._addresses), failed, 0)

    def _word(self, at: int) -> ctypes.c_int64:
        return ctypes.c_int64.from_address(self._address + at)


class Waited(Protocol):
    """What jobs of a list wait for."""

    def arm(self, until_ns: int) -> None:
        """Let jobs wait until this time; nothing has ended a list so far."""

    def ended(self) -> int | None:
        """Where in its list the job is that waited in vain, if one did. Raises what failed."""


def run_waiting(replay: JobReplay, waited: Sequence[Waited]) -> bool:
    """Run recorded jobs that wait, and say True; False where they are stale.

    Raises what failed.
    """
    with replay.pool.lock:
        if replay.stale:
            return False
        first, more = 0, run_for_a_while(waited, partial(replay.pool.run_all, replay.jobs))
        while more is not None:
            first += more
            run = partial(replay.pool.run_all, replay.jobs, first=first)
            more = run_for_a_while(waited, run)
    return True


def run_for_a_while(waited: Sequence[Waited], run: Callable[[], None]) -> int | None:
    """Run jobs: where they ended, if before the last. Raises what failed."""
    until = time.perf_counter_ns() + int(HEARD_S * 1e9)
    for one in waited:
        one.arm(until)
    run()
    ended = [one.ended() for one in waited]
    return next((at for at in ended if at is not None), None)
