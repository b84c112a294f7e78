"""QueuedMoves: experts that threads read without Python, for a device that is the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
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
        # How experts are cut, whose offsets are from that of the expert; those alike are one.
        self._pieces: dict[bytes, NDArray[np.int64]] = {}
        # By key:
        self._chunks = np.zeros(len(self._experts), dtype=np.int64)  # address of its pieces
        self._layer = np.array([one.layer for one in self._experts])
        self._offsets = np.zeros(len(self._experts), dtype=np.int64)
        self._counts = np.array([-(one not in self._sources) for one in self._experts])  # -1: new

    def start(self, slots: Slots, keys: Slots, hosts: Slots, urgent: int) -> None:
        self._look_at(keys)
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

    def all_queued(self) -> bool:
        """Whether the queue reads all experts."""
        if not (self._counts > 0).all():
            self._look_at(np.arange(len(self._counts)))
        return bool(self._counts.all())

    def arrays(self) -> dict[str, NDArray[Any]]:
        """What jobs share that have the queue read: fields of `CacheWords`.

        Files of layers are descriptors, which stay open; 0 for layers without experts.
        """
        descriptor = self._transfers.reader.descriptor
        files = [descriptor(one.file.path) if one.count else 0 for one in self._layers]
        return {
            "files": np.array(files, dtype=np.int64),
            "queue_keys": self._keys,
            "queued": self._queued,
            "offsets": self._offsets,
            "pieces": self._counts,
            "chunks": self._chunks,
        }

    def memory_words(self) -> dict[str, int]:
        """What these know of the queue and the slots: fields of `CacheWords`."""
        spoiled = self._stride // 8 * 8 if self._transfers.poison else 0
        memory = self._memory.data_ptr()
        words = {"queue": self._queue.address, "memory": memory}
        return words | {"stride": self._stride, "spoiled": spoiled}

    def taken_over(self, free: Sequence[int], coming: Slots) -> None:
        """Jobs have used the queue; slots that are free now, and those that nobody has waited for.

        Of these some may have been read already: guesses.
        """
        for slot in free:
            self._reads[slot] = None
        coming = coming[self._queued[coming]]
        layers = self._layer[self._keys[coming]]
        stamps = {i: self._checks.stamp(self._layers[i].file) for i in set(layers.tolist())}
        self._stamps |= {
            s: stamps[i] for s, i in zip(coming.tolist(), layers.tolist(), strict=True)
        }

    def check_files(self, layers: Sequence[int]) -> None:
        """Experts of these layers have come by jobs. Raises ChecksumError."""
        for layer in layers:
            file = self._layers[layer].file
            self._checks.passed(self._layers[layer].image(0), self._checks.stamp(file))

    def _look_at(self, keys: Slots) -> None:
        """Find out what experts are read by."""
        for key in keys[self._counts[keys] < 0].tolist():
            self._look_at_one(key)

    def _look_at_one(self, key: int) -> None:
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
        alike = self._pieces.setdefault(pieces.tobytes(), pieces)
        self._chunks[key], self._offsets[key] = alike.ctypes.data, first
        self._counts[key] = len(pieces)

    def _ask(self, slots: Slots, keys: Slots, urgent: int) -> None:
        reader, layers = self._transfers.reader, self._layer[keys]
        chunks = np.zeros((len(slots), self._most, 5), dtype=np.int64)
        for layer in set(layers.tolist()):
            file, mine = self._layers[layer].file, layers == layer
            stamp = self._checks.stamp(file)
            self._stamps.update(dict.fromkeys(slots[mine].tolist(), stamp))
            chunks[mine, :, 0] = reader.descriptor(file.path)
        for at, count, some in zip(self._chunks[keys], self._counts[keys], chunks, strict=True):
            some[:count, 1:] = int64_array(int(at), 4 * int(count)).reshape(-1, 4)
        chunks[:, :, 1] += self._offsets[keys, None]
        chunks[:, :, 2] += (self._memory.data_ptr() + slots * self._stride)[:, None]
        self._queue.fail(slots)  # if this ends before they are asked for
        self._keys[slots], self._queued[slots] = keys, True
        self._queue.ask(slots, chunks, self._counts[keys], urgent)

    def _wait(self, slots: Slots) -> None:
        """Sleep until nothing is written to slots any more."""
        while not self._queue.done(slots).all():
            self.check()
            self._queue.wait(slots)

    @property
    def alive(self) -> bool:
        """Whether the reading threads are there, which a fork leaves behind."""
        return self._transfers.alive

    def check(self) -> None:
        """Raise DiskReadError where nobody reads any more."""
        if self._queue.stopped:
            raise DiskReadError("the disk reader is closed")
        if not self.alive:
            raise DiskReadError("the reading threads died or were forked away")

    def _read_again(self, slot: int) -> None:
        """Read by Python what the queue could not. Raises DiskReadError."""
        key, memory = int(self._keys[slot]), self._held(slot)
        if not self._queue.dropped(slot):
            self._counts[key] = 0  # nor will it be able to another time
        self._queued[slot] = False
        read = self._reads[slot] = self._transfers.read_unit(self._image(key), memory, False, None)
        read.wait()


def int64_array(at: int, count: int) -> NDArray[np.int64]:
    """The numbers at an address."""
    return np.ctypeslib.as_array((ctypes.c_int64 * count).from_address(at))
