"""Activations on disk from a layer's forward to its backward, by way of two stages.

Stages are in the memory of what computes.
"""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import TypeAlias

import torch
from torch import Tensor

from qoff.memory.arena import PAGE, map_pages, round_up

from .homes import Home, Link, Read

STAGES = 2  # one is computed with, another is written or read
LINE = 64  # bytes that every tensor on a stage is aligned to
_PROBE = 32 << 20  # bytes that are written and read to measure the disk

Place: TypeAlias = tuple[int, int]  # layer and micro-batch


class Stage:
    """What one layer has saved, one tensor's storage behind the other."""

    def __init__(self, memory: Tensor) -> None:
        self.memory, self.used = memory, 0
        self._room = 0
        self._starts: dict[int, int] = {}  # of storages, by address
        self._alive: list[Tensor] = []  # until the layer is done: or addresses would come again

    def take(self, x: Tensor) -> tuple[int, torch.dtype, torch.Size, tuple[int, ...]] | None:
        """Copy a tensor, with all that its storage has; returns what `at` finds it by.

        None where it has no room: it has to stay where it is.
        """
        storage = x.untyped_storage()
        start = self._starts.get(storage.data_ptr())
        if start is None:
            start, nbytes = self.used, storage.nbytes()
            if start + nbytes > self._room:
                return None
            whole = torch.empty(0, dtype=torch.uint8, device=x.device)
            whole.set_(storage, 0, (nbytes,), (1,))
            self.memory[start : start + nbytes].copy_(whole)
            self._starts[storage.data_ptr()] = start
            self._alive.append(x)
            self.used = round_up(start + nbytes, LINE)
        offset = start + int(x.storage_offset()) * x.itemsize
        return offset, x.dtype, x.shape, x.stride()

    def at(
        self, offset: int, dtype: torch.dtype, shape: torch.Size, stride: tuple[int, ...]
    ) -> Tensor:
        """A tensor that was taken."""
        # `data`: with a version counter of its own.
        whole = self.memory[: len(self.memory) // LINE * LINE].view(dtype).data
        first = int(whole.storage_offset()) + offset // dtype.itemsize
        return whole.as_strided(shape, stride, first)

    def done(self) -> None:
        """All is copied."""
        self._alive.clear()

    def clear(self, room: int = 0) -> None:
        """Begin with another layer, which has so many bytes."""
        self.used, self._room = 0, room
        self._starts.clear()
        self._alive.clear()


class Swaps:
    """Writes stages to disk in the forward pass and reads them back in the order of the backward.

    home: on disk, or None for none. allocate: gives bytes of the memory that is computed with.
    rate: bytes per second there and back, as measured.
    """

    def __init__(
        self, link: Link, home: Home | None, allocate: Callable[[int], Tensor] = map_pages
    ) -> None:
        self.capacity = 0 if home is None else home.nbytes
        self._link, self._home, self._allocate = link, home, allocate
        self._free: queue.SimpleQueue[Stage] = queue.SimpleQueue()
        self._each = 0  # bytes of a stage
        self._end = 0  # on disk
        self._places: dict[Place, tuple[Home, Future[None]]] = {}
        self._order: deque[Place] = deque()  # of those to be read
        self._here: dict[Place, tuple[Stage, Read]] = {}
        self.rate = self._measured() if self.capacity else 0.0

    def begin(self, each: int) -> None:
        """Make stages for a step. each: bytes that a place saves, at most; 0: none does."""
        each = round_up(each, PAGE)
        if each != self._each:
            self._free = queue.SimpleQueue()
            for _ in range(STAGES if each else 0):
                self._free.put(Stage(self._allocate(each)))
            self._each = each
        self._end = 0

    def stage(self, room: int) -> Stage:
        """One to save a layer to, up to so many bytes; waits for a write.

        More would have no place on disk: what values decide (routed experts) may take more.
        """
        found = self._free.get()
        found.clear(room)
        return found

    def write(self, place: Place, stage: Stage) -> None:
        """Start writing what a layer has saved."""
        assert self._home is not None
        nbytes = round_up(stage.used, PAGE)
        assert self._end + nbytes <= self.capacity
        home = Home(self._home.what, nbytes, None, self._home.offset + self._end)
        self._end += nbytes
        stage.done()
        write = self._link.write(home, stage.memory[:nbytes], lambda: self._free.put(stage))
        self._places[place] = home, write

    def drop(self, stage: Stage) -> None:
        """A layer that was to be saved has failed."""
        stage.clear()
        self._free.put(stage)

    def order(self, places: Iterable[Place]) -> None:
        """Read those of these places that were written, in this order, from now on.

        Raises DiskWriteError for any that was not: no weight is changed yet.
        """
        for _, write in self._places.values():
            write.result()
        self._order.extend(place for place in places if place in self._places)
        self._read_ahead()

    def read(self, place: Place) -> Stage:
        """What a layer has saved, until `give_back`. Raises DiskReadError."""
        stage, read = self._here[place]
        read.result()
        return stage

    def give_back(self, place: Place) -> None:
        """Its stage is free: read the next."""
        self._free.put(self._here.pop(place)[0])
        self._read_ahead()

    def stop(self) -> None:
        """Wait for all that is on its way, and forget it."""
        for _, write in self._places.values():
            write.exception()
        self._places.clear()
        self._order.clear()
        for stage, read in self._here.values():
            read.exception()
            self._free.put(stage)
        self._here.clear()

    def _read_ahead(self) -> None:
        while self._order and len(self._here) < STAGES:
            place = self._order.popleft()
            home, _ = self._places[place]
            stage = self._free.get()
            stage.used = home.nbytes
            self._here[place] = stage, self._link.read(home, stage.memory[: home.nbytes])

    def _measured(self) -> float:
        assert self._home is not None
        nbytes = min(_PROBE, self.capacity) // PAGE * PAGE
        memory = self._allocate(nbytes).fill_(1)
        start = time.perf_counter()
        self._link.write(self._home, memory, lambda: None).result()
        error = self._link.read(self._home, memory).exception()
        if error is not None:
            raise error
        return nbytes / max(time.perf_counter() - start, nbytes / 1e11)
