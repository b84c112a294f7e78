"""QueuedMoves: experts that threads read without Python, for a device that is the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from qoff.errors import DiskReadError
from qoff.memory.arena import PAGE
from qoff.memory.io.runs import Run
from qoff.memory.plan import Image

from .moves import ExpertMoves, Slots

_RANGES = 8  # of a file that an expert has, at most; one that has more is read as others are


class QueuedMoves(ExpertMoves):
    """Reads experts that are whole blocks of their files by a `ReadQueue`, all else as others do.

    What the queue could not read is read again, for what that does or says about it.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        slots, self._stride = self._memory.shape
        self._most = self._stride // self._transfers.reader.chunk + _RANGES
        self._queue = self._transfers.reader.queue(slots, self._most)
        self._queued = np.zeros(slots, dtype=bool)  # by slot: its expert is read by the queue
        self._keys = np.full(slots, -1)  # by slot
        self._pieces: dict[int, NDArray[np.int64]] = {}  # by layer; offsets from those of experts
        # By key:
        self._layer = np.array([one.layer for one in self._experts])
        self._offsets = np.zeros(len(self._experts), dtype=np.int64)
        self._counts = np.array([-(one not in self._sources) for one in self._experts])  # -1: new

    def start(self, slots: Slots, keys: Slots, hosts: Slots, urgent: int) -> None:
        for key in keys[self._counts[keys] < 0].tolist():
            self._look_at(key)
        queued = (self._counts[keys] > 0) & (hosts < 0)
        if queued.any():
            self._ask(slots[queued], keys[queued], int(queued[:urgent].sum()))
        if not queued.all():
            urgent = int((~queued[:urgent]).sum())
            super().start(slots[~queued], keys[~queued], hosts[~queued], urgent)

    def begun(self, slots: Slots) -> NDArray[np.bool_]:
        queued = self._queued[slots]
        return queued if queued.all() else queued | super().begun(slots)

    def done(self, slots: Slots) -> NDArray[np.bool_]:
        queued = self._queued[slots]
        found = ~queued | self._queue.done(slots)
        if not queued.all():
            found[~queued] = super().done(slots[~queued])
        return found

    def settle(self, slots: Slots) -> None:
        queued = self._queued[slots]
        self._wait(slots[queued])
        if not queued.all():
            super().settle(slots[~queued])

    def finish(self, slots: Slots) -> None:
        queued = self._queued[slots]
        mine = slots[queued]
        self._wait(mine)
        for slot in mine[self._queue.failed(mine)].tolist():
            self._read_again(slot)
        layers = self._layer[self._keys[mine]].tolist()
        passed = {
            (layer, self._stamps[s]): s for s, layer in zip(mine.tolist(), layers, strict=True)
        }
        for (_, stamp), slot in passed.items():
            self._checks.passed(self._image(int(self._keys[slot])), stamp)
        if not queued.all():
            super().finish(slots[~queued])

    def hurry(self, slots: Slots) -> None:
        self._queue.hurry(slots[self._queued[slots]])

    def waits(self, slots: Slots) -> NDArray[np.bool_]:
        return self._queued[slots] & ~self._queue.begun(slots)

    def abandon(self, slot: int) -> None:
        if self._queued[slot]:
            self._queue.drop(np.array([slot]))
        else:
            super().abandon(slot)

    def recycle(self, slots: Slots) -> None:
        super().recycle(slots)
        self._queued[slots] = False

    def _held(self, slot: int) -> Tensor:
        if not self._queued[slot]:
            return super()._held(slot)
        return self._memory[slot][: self._image(int(self._keys[slot])).nbytes]

    def _image(self, key: int) -> Image:
        expert = self._experts[key]
        return self._layers[expert.layer].image(expert.number)

    def _look_at(self, key: int) -> None:
        """Find out what an expert is read by."""
        image, reader = self._image(key), self._transfers.reader
        self._counts[key] = 0
        if image.repacked or image.widened or self._stride % PAGE:
            return
        runs = [Run(one.offset, one.at, one.nbytes) for one in image.ranges]
        found = reader.whole_blocks(image.file.path, runs)
        if found is None or len(found) > self._most:
            return
        pieces = np.array(found)
        first = pieces[0, 0]
        pieces[:, 0] -= first
        same = self._pieces.setdefault(int(self._layer[key]), pieces)
        if np.array_equal(same, pieces):
            self._offsets[key], self._counts[key] = first, len(pieces)

    def _ask(self, slots: Slots, keys: Slots, urgent: int) -> None:
        reader, layers = self._transfers.reader, self._layer[keys]
        chunks = np.zeros((len(slots), self._most, 5), dtype=np.int64)
        for layer in set(layers.tolist()):
            file, mine = self._layers[layer].file, layers == layer
            stamp, pieces = self._checks.stamp(file), self._pieces[layer]
            self._stamps.update(dict.fromkeys(slots[mine].tolist(), stamp))
            chunks[mine, :, 0] = reader.descriptor(file.path)
            chunks[mine, : len(pieces), 1:] = pieces
        chunks[:, :, 1] += self._offsets[keys, None]
        chunks[:, :, 2] += (self._memory.data_ptr() + slots * self._stride)[:, None]
        self._queue.fail(slots)  # if this ends before they are asked for
        self._keys[slots], self._queued[slots] = keys, True
        self._queue.ask(slots, chunks, self._counts[keys], urgent)

    def _wait(self, slots: Slots) -> None:
        """Sleep until nothing is written to slots any more."""
        queue, transfers = self._queue, self._transfers
        while not queue.done(slots).all():
            if queue.stopped:
                raise DiskReadError("the disk reader is closed")
            if not transfers.alive:
                raise DiskReadError("the reading threads died or were forked away")
            queue.wait(slots)

    def _read_again(self, slot: int) -> None:
        """Read by Python what the queue could not. Raises DiskReadError."""
        key, memory = int(self._keys[slot]), self._held(slot)
        if not self._queue.dropped(slot):
            self._counts[key] = 0  # nor will it be able to another time
        self._queued[slot] = False
        read = self._reads[slot] = self._transfers.read_unit(self._image(key), memory, False, None)
        read.wait()
