"""SlotRing: units streaming through a few slots, read ahead in a cyclic order.

The order repeats without end; every slot holds, or is being filled with, one element of it. A
slot that is released takes the next element at once, asked for or not, also across the end of the
cycle. Whoever keeps to the order finds every unit under way; whoever jumps has the elements that
were skipped dropped, and the sequence goes on from there.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from qoff.checkpoint import Stamp
from qoff.errors import ArgumentError, DiskReadError, QoffError
from qoff.interrupts import whole

from .io.disk import ReadRequest
from .io.runs import Fill
from .io.transfers import Mark, Transfers, UnitRead
from .load import FileChecks
from .plan import Image, Unit

if TYPE_CHECKING:
    from qoff.kernels.cpu.jit.slots import Slots


@dataclass(eq=False)
class _Load:
    """One element of the sequence in its slot."""

    unit: Unit
    slot: int
    read: UnitRead
    stamp: Stamp | None  # of its file, before it was read
    holders: int = 0
    told: bool = False  # by its slot's words, when it is there


@dataclass(eq=False)
class _Sweep:
    """So many units that jobs wait for, and all that is read meanwhile."""

    count: int
    words: Slots
    loads: list[_Load] = field(default_factory=list)
    request: ReadRequest | None = None

    def stop(self) -> None:
        """Begin no further read."""
        assert self.request is not None
        self.request.abandon()
        self.words.fail(DiskReadError("the sweep has ended"))


class SlotRing:
    """The slots of a weight store. Methods may be called from many threads.

    `images` says how each unit lies in a slot, and in which order they are read ahead; `slots` are
    the slots' memory. Units of `sources` are copied from host memory, the others read
    from disk, and checked against its file's checksum unless `checks` knows the file.
    """

    def __init__(
        self,
        images: Mapping[Unit, Image],
        sources: Mapping[Unit, Tensor],
        slots: Sequence[Tensor],
        transfers: Transfers,
        checks: FileChecks,
    ) -> None:
        self._images = images
        self._sources = sources
        self._slots = slots
        self._transfers = transfers
        self._checks = checks
        self.wait_s = 0.0  # that `acquire` waited
        self._lock = threading.Lock()
        self._order = tuple[Unit, ...](images)
        self._next = 0  # the element of the order that is read next
        self._loads: list[_Load] = []  # in the order of the sequence
        self._free = self._recycled(range(len(slots)))
        self._closed = False
        self._words: Slots | None = None  # of the slots, in sweeps
        self._sweep: _Sweep | None = None  # under way
        self._unsettled: list[_Load] = []  # of one that was given up, with an interrupt on the way
        with self._lock:
            self._read_ahead()

    def acquire(self, unit: Unit) -> int:
        """Wait for a unit and return the slot it is in; it stays there until as many releases.

        Raises what went wrong in reading it (the next call tries again), and RuntimeError when all
        slots are held.
        """
        with self._lock:
            if self._closed:
                raise ArgumentError("the weight store is closed")
            if self._sweep is not None:
                raise RuntimeError(f"unit {unit!r} is asked for in the middle of a sweep")
            self._settle()
            load = self._find(unit) or self._jump(unit)
            load.holders += 1
        start = self._transfers.clock.now()
        try:
            load.read.wait()
            if unit not in self._sources:
                self._checks.passed(load.read.image, load.stamp)
        except BaseException:
            with self._lock:
                load.holders -= 1
                if load.holders == 0:
                    self._drop([load])
            raise
        finally:
            with self._lock:
                self.wait_s += self._transfers.clock.now() - start
        return load.slot

    def release(self, unit: Unit) -> None:
        """Undo one `acquire`; the last one frees the slot, and the next unit is read into it."""
        with self._lock:
            load = next((x for x in self._loads if x.unit == unit and x.holders), None)
            if load is None:
                raise ArgumentError(f"unit {unit!r} is released but was not acquired")
            load.holders -= 1
            if load.holders == 0:
                self._drop([load])
                self._read_ahead()

    def follow(self, order: Sequence[Unit]) -> None:
        """Begin another cyclic order, which may have a unit more than once."""
        with self._lock:
            self._drop([load for load in self._loads if not load.holders])
            self._order, self._next = tuple(order), 0
            self._read_ahead()

    def sweep(self, units: Sequence[Unit]) -> tuple[Slots, list[int]] | None:
        """Begin to use these units by jobs that wait for slots and give them back.

        The slots' words, and the slot of each unit. What is given back is read into without Python,
        as `release` does it; until `swept` no unit can be acquired. None, and nothing has begun,
        where these are not the next units in the order, one is held or failed, or one needs more
        than to be read from its file: a copy, a check, another packing.
        """
        with self._lock:
            self._settle()
            loads, count = self._loads, len(units)
            ahead = [self._order[(self._next + i) % len(self._order)] for i in range(count)]
            order = [*(load.unit for load in loads), *ahead][:count]
            busy = self._sweep is not None or any(load.holders for load in loads)
            if self._closed or busy or order != list(units) or (count and self._free):
                return None
            stamps = [self._checks.stamp(self._images[unit].file) for unit in ahead]
            if not all(map(self._only_read, ahead, stamps)):
                return None
            words = self._words = self._words or self._new_words()
            if not any(load.told for load in loads):
                words.begin()
            if words.failed or not all(self._tell(load, words) for load in loads if count):
                return None
            slots = [loads[i % len(loads)].slot for i in range(count)]
            self._sweep = sweep = _Sweep(count, words)
            try:
                if count:
                    turns = [words.used(slot) + 1 + i // len(loads) for i, slot in enumerate(slots)]
                    self._read_in_sweep(sweep, ahead, stamps, slots, turns)
            except BaseException:
                self._sweep = None
                if sweep.request is not None:
                    self._give_up(sweep)
                raise
            return words, slots

    def swept(self, done: bool) -> None:
        """End a sweep. Not done: what it has read is dropped."""
        with self._lock:
            sweep, self._sweep = self._sweep, None
            assert sweep is not None
            self.wait_s += sweep.words.waited_s()
            if not sweep.count:
                return
            if not done:
                self._give_up(sweep)
            elif not self._closed:
                self._loads += sweep.loads
                del self._loads[: sweep.count]
                self._next = (self._next + sweep.count) % len(self._order)

    def close(self) -> None:
        """Read nothing more, forget everything; the transfers then stop what is under way."""
        with self._lock:
            self._closed = True
            self._loads.clear()
            self._free.clear()
            self._unsettled.clear()
            self._words = None  # an error in them has a traceback, which holds what was read

    def _give_up(self, sweep: _Sweep) -> None:
        """End the reads of a sweep; what is in slots is forgotten."""
        sweep.stop()
        if self._closed:
            return
        self._unsettled, self._loads = [*self._loads, *sweep.loads], []
        self._settle()

    def _settle(self) -> None:
        """Free the slots of what was given up, once nothing is written to them any more."""
        for load in self._unsettled:
            load.read.settle()
        if self._unsettled:
            self._unsettled, self._free = [], self._recycled(range(len(self._slots)))
        self._drop([x for x in self._loads if x.read.abandoned and not x.holders])  # interrupted

    def _recycled(self, slots: Iterable[int]) -> list[tuple[int, Mark]]:
        """Slots that nobody reads or writes, and what has to be reached before they are filled."""
        return [(slot, self._transfers.recycle(self._slots[slot])) for slot in slots]

    def _find(self, unit: Unit) -> _Load | None:
        """The first element of this unit; the idle ones before it are dropped."""
        for i, load in enumerate(self._loads):
            if load.unit == unit:
                skipped = [x for x in self._loads[:i] if not x.holders]
                if skipped:
                    self._drop(skipped)
                    with whole():
                        self._read_ahead()
                return load
        return None

    def _jump(self, unit: Unit) -> _Load:
        """Go on with the sequence from this unit."""
        ahead = [x for x in self._loads if not x.holders]
        if not ahead and not self._free:
            held = ", ".join(repr(x.unit) for x in self._loads)
            raise RuntimeError(
                f"unit {unit!r} needs a slot, but all {len(self._slots)} are held by units {held}; "
                "release one first or plan for more slots"
            )
        self._drop(ahead)
        self._next = self._order.index(unit)
        with whole():  # each slot that is read into is noted
            self._read_ahead()
        return next(x for x in self._loads if x.unit == unit)

    def _read_ahead(self) -> None:
        """Start to bring the next elements into all free slots."""
        while self._free:
            unit = self._order[self._next]
            self._next = (self._next + 1) % len(self._order)
            slot, mark = self._free.pop(0)
            image = self._images[unit]
            memory = self._slots[slot][: image.nbytes]
            stamp = None
            if unit in self._sources:
                read = self._transfers.copy_unit(image, self._sources[unit], memory, mark)
            else:
                stamp = self._checks.stamp(image.file)
                known = self._checks.known(image.file, stamp)
                read = self._transfers.read_unit(image, memory, not known, mark)
            self._loads.append(_Load(unit, slot, read, stamp))

    def _drop(self, loads: list[_Load]) -> None:
        """Free the slots of loads that nobody holds, once nothing is written to them any more."""
        if self._closed:
            return
        for load in loads:
            load.read.abandon()
        for load in loads:
            load.read.settle()
            left, free = [x for x in self._loads if x is not load], self._recycled([load.slot])
            self._loads, self._free = left, self._free + free  # both, if it is interrupted

    def _only_read(self, unit: Unit, stamp: Stamp | None) -> bool:
        """Whether a unit is there when its file, which has this stamp, has been read."""
        image = self._images[unit]
        placed = image.repacked or image.widened or unit in self._sources
        return not placed and self._checks.known(image.file, stamp)

    def _new_words(self) -> Slots:
        from qoff.kernels.cpu.jit.slots import Slots  # compiled when it is imported

        addresses = [memory.data_ptr() for memory in self._slots]
        nbytes = min((memory.nbytes for memory in self._slots), default=0)
        return Slots(addresses, nbytes, self._transfers.poison)

    def _tell(self, load: _Load, words: Slots) -> bool:
        """Have a slot's words say when its unit is there; False if it cannot be had."""
        if load.told:
            return True
        try:
            load.read.wait()
            self._checks.passed(load.read.image, load.stamp)
        except QoffError:  # which `acquire` raises
            return False
        words.set_filled(load.slot)
        return True

    def _read_in_sweep(
        self,
        sweep: _Sweep,
        units: Sequence[Unit],
        stamps: Sequence[Stamp | None],
        slots: Sequence[int],
        turns: Sequence[int],
    ) -> None:
        """Start to read each of these units into its slot, when that is given back."""
        fills = []
        for unit, stamp, slot, turn in zip(units, stamps, slots, turns, strict=True):
            image = self._images[unit]
            memory = self._slots[slot][: image.nbytes]
            parts = [(r.offset, memory[r.at : r.at + r.nbytes]) for r in image.ranges]
            fills.append(Fill(image.file.path, parts, sweep.words.words(slot), turn))
            read = UnitRead(self._transfers, image, memory)
            sweep.loads.append(_Load(unit, slot, read, stamp, told=True))
        sweep.request = self._transfers.reader.submit_list(fills, sweep.words.fail)
        for load in sweep.loads:
            load.read.futures.append(sweep.request)
