"""ExpertMoves: what brings experts to the slots of a cache, and takes those that leave."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from qoff.checkpoint import Stamp
from qoff.memory.io.transfers import Mark, Transfers, UnitRead
from qoff.memory.load import FileChecks
from qoff.memory.plan import Expert, Unit
from qoff.memory.plan.experts import LayerExperts

Slots: TypeAlias = NDArray[np.int64]


class ExpertMoves:
    """Reads and copies experts by `transfers`. Arrays are of slots, or of what goes with each.

    experts: by key. memory, in_host: uint8 [slots, bytes], of the device and the host. sources:
    those of experts that are in host memory for good.
    """

    def __init__(
        self,
        layers: Sequence[LayerExperts],
        experts: Sequence[Expert],
        memory: Tensor,
        in_host: Tensor,
        sources: Mapping[Unit, Tensor],
        transfers: Transfers,
        checks: FileChecks,
    ) -> None:
        self._layers, self._experts, self._sources = layers, experts, sources
        self._memory, self._in_host = memory, in_host
        self._transfers, self._checks = transfers, checks
        self._marks: list[Mark] = [transfers.recycle(part) for part in memory]
        self._reads: list[UnitRead | None] = [None] * len(memory)
        self._stamps: dict[int, Stamp | None] = {}  # of files that are read, before they are

    def start(self, slots: Slots, keys: Slots, hosts: Slots, urgent: int) -> None:
        """Start to bring experts, in this order. hosts: where they are in host memory; -1: not.

        urgent: the first so many; the others may come after what is asked for later. Raises what
        went wrong; `begun` says of which.
        """
        for slot, key, host in zip(slots.tolist(), keys.tolist(), hosts.tolist(), strict=True):
            expert, mark = self._experts[key], self._marks[slot]
            image = self._layers[expert.layer].image(expert.number)
            memory = self._memory[slot][: image.nbytes]
            source = self._sources.get(expert)
            if host >= 0:
                source = self._in_host[host][: image.nbytes]
            self._stamps.pop(slot, None)
            if source is not None:
                read = self._transfers.copy_unit(image, source, memory, mark)
            else:
                self._stamps[slot] = self._checks.stamp(image.file)
                read = self._transfers.read_unit(image, memory, False, mark)
            self._reads[slot] = read

    def begun(self, slots: Slots) -> NDArray[np.bool_]:
        """Which are on their way to a slot, or there."""
        return np.array([self._reads[slot] is not None for slot in slots.tolist()], dtype=bool)

    def done(self, slots: Slots) -> NDArray[np.bool_]:
        """Of which `finish` does not wait for other threads."""
        reads = [self._read_of(slot) for slot in slots.tolist()]
        return np.array([all(f.done() for f in read.futures) for read in reads], dtype=bool)

    def settle(self, slots: Slots) -> None:
        """Return when nothing is written any more that later uses do not follow."""
        for slot in slots.tolist():
            self._read_of(slot).settle()

    def finish(self, slots: Slots) -> None:
        """Return when computations may use them. Raises what went wrong, ChecksumError."""
        for slot in slots.tolist():
            read = self._read_of(slot)
            read.wait()
            if slot in self._stamps:
                self._checks.passed(read.image, self._stamps[slot])

    def hurry(self, slots: Slots) -> None:
        """Have what was not urgent be so now."""

    def waits(self, slots: Slots) -> NDArray[np.bool_]:
        """Of which nothing was read yet, as far as that is known."""
        return np.zeros(len(slots), dtype=bool)

    def abandon(self, slot: int) -> None:
        """Do no more of it than is already started."""
        self._read_of(slot).abandon()

    def save(self, slot: int, host: int) -> None:
        """Copy what is in a slot to one in host memory."""
        memory = self._held(slot)
        self._transfers.save(memory, self._in_host[host][: len(memory)])

    def recycle(self, slots: Slots) -> None:
        """Mark the end of all use of slots, which now hold nothing."""
        for slot in slots.tolist():
            self._marks[slot] = self._transfers.recycle(self._memory[slot])
            self._reads[slot] = None

    def _held(self, slot: int) -> Tensor:
        """The memory of what is in a slot."""
        return self._read_of(slot).memory

    def _read_of(self, slot: int) -> UnitRead:
        read = self._reads[slot]
        assert read is not None
        return read


MakeMoves: TypeAlias = Callable[..., ExpertMoves]
