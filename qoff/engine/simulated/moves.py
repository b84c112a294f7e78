"""Experts on their way in virtual time: all of a request in one step, without threads or files."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qoff.memory.experts.moves import ExpertMoves, Slots
from qoff.memory.plan.experts import LayerExperts

from .machine import VirtualMachine
from .transfers import SimulatedReader


class SimulatedMoves(ExpertMoves):
    """Brings nothing, and takes as long as the machine's links.

    Experts come over a link one after another, in the order of the calls.
    """

    def __init__(self, machine: VirtualMachine, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._machine = machine
        read, held = _bytes_of(self._layers)
        self._read_bytes, self._held_bytes = read, held  # by key: of its file, in a slot
        self._stay = np.array([one in self._sources for one in self._experts], dtype=bool)
        self._sizes = np.zeros(len(self._marks), dtype=np.int64)  # by slot
        self._ready = np.zeros(len(self._marks))  # when nothing is waited for but a GPU's stream
        self._ended = np.zeros(len(self._marks))  # when it is there
        self._left = np.zeros(len(self._marks))  # by slot, when what was there has left
        self._saved = np.zeros(len(self._in_host) + 1)  # by slot in host memory; the last: of none

    def start(self, slots: Slots, keys: Slots, hosts: Slots, urgent: int) -> None:
        machine, now = self._machine, self._machine.clock.now()
        self._sizes[slots] = self._held_bytes[keys]
        self._ready[slots] = self._ended[slots] = now
        if machine.loading:
            return
        near = (hosts >= 0) | self._stay[keys]
        self._copy(slots[near], hosts[near])
        self._read(slots[~near], keys[~near])

    def _copy(self, slots: Slots, hosts: Slots) -> None:
        """From host memory, over the link to the device."""
        nbytes, ready = self._sizes[slots], np.maximum(self._left[slots], self._saved[hosts])
        self._ended[slots] = self._machine.to_device.queue(nbytes, 1, ready, in_order=True)
        if not self._machine.profile.on_gpu:
            self._ready[slots] = self._ended[slots]
        self._transfers.copied_bytes += int(nbytes.sum())

    def _read(self, slots: Slots, keys: Slots) -> None:
        """From files; to a GPU's memory through buffers, each part of which is a request."""
        reader, nbytes = self._transfers.reader, self._read_bytes[keys]
        assert isinstance(reader, SimulatedReader)
        reader.count(int(nbytes.sum()))
        buffer = self._transfers.buffer_bytes
        parts = -(-int(self._sizes[slots].max(initial=1)) // buffer) if buffer else 1
        self._ready[slots] = self._ended[slots] = self._machine.read.queue(nbytes, parts)
        if self._machine.profile.on_gpu:
            link, ready = self._machine.to_device, np.maximum(self._ready[slots], self._left[slots])
            self._ended[slots] = link.queue(self._sizes[slots], parts, ready)

    def begun(self, slots: Slots) -> NDArray[np.bool_]:
        return np.ones(len(slots), dtype=bool)

    def done(self, slots: Slots) -> NDArray[np.bool_]:
        found: NDArray[np.bool_] = self._ready[slots] <= self._machine.clock.now()
        return found

    def settle(self, slots: Slots) -> None:
        self._wait(self._ready[slots])

    def finish(self, slots: Slots) -> None:
        self._wait(self._ended[slots])

    def abandon(self, slot: int) -> None:
        """What is on its way takes its time, and nobody waits for it."""
        self._ready[slot] = self._machine.clock.now()

    def save(self, slot: int, host: int) -> None:
        if self._machine.loading:
            return
        size = int(self._sizes[slot])
        self._transfers.save(self._memory[slot][:size], self._in_host[host][:size])
        self._left[slot] = self._saved[host] = self._machine.from_device.free_at

    def recycle(self, slots: Slots) -> None:
        """There is nothing in them."""

    def _wait(self, times: NDArray[np.float64]) -> None:
        latest = float(times.max(initial=0.0))
        if latest > self._machine.clock.now():
            self._machine.clock.sleep_until(latest)


def _bytes_of(layers: Sequence[LayerExperts]) -> tuple[Slots, Slots]:
    """Of each expert, what is read of its file, and what it takes in a slot."""
    found = dict[Hashable, list[tuple[int, int]]]()
    every = list[tuple[int, int]]()
    for layer in layers:
        lies = layer.lies
        if lies not in found:
            images = [layer.image(number) for number in range(layer.count)]
            found[lies] = [(one.bytes_read, one.nbytes) for one in images]
        every += found[lies]
    read, held = np.array(every, dtype=np.int64).reshape(-1, 2).T
    return read, held
