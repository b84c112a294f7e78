"""Hidden states between units: those at work, and what each unit was given, for its backward."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TypeAlias

import torch
from torch import Tensor

from qoff.memory.arena import PAGE, round_up

from .homes import Home, Homes

STAGES = 3  # on their way to disk, or from there
_Form: TypeAlias = tuple[torch.Size, torch.dtype]


class Boundaries:
    """A column of hidden states, one for each micro-batch, and a home for each unit's inputs.

    column: memory for each micro-batch. homes: by unit and micro-batch. stages: for those on disk.
    """

    def __init__(
        self,
        homes: Homes,
        column: Sequence[Tensor],
        inputs: Sequence[Sequence[Home]],
        stages: Sequence[Tensor],
    ) -> None:
        self._homes, self._column, self._inputs = homes, column, inputs
        self._free: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        for stage in stages:
            self._free.put(stage)
        self._writes: dict[tuple[int, int], Future[None]] = {}
        self._reads: deque[tuple[tuple[int, int], Tensor, Future[None]]] = deque()
        self._held = False  # the first of the reads, by who called `load`
        self._forms: dict[int, _Form] = {}  # of what is in the column
        self._saved: dict[tuple[int, int], _Form] = {}  # of inputs, by unit and micro-batch

    def put(self, m: int, hidden: Tensor) -> Tensor:
        """Take hidden states, or a gradient of them, into the column; returns the copy."""
        self._forms[m] = hidden.shape, hidden.dtype
        place = self.at(m)
        place.copy_(hidden.detach())
        return place

    def at(self, m: int) -> Tensor:
        """What is in the column."""
        return _view(self._column[m], self._forms[m])

    def save(self, i: int, m: int) -> None:
        """Keep what is in the column as the input of unit i."""
        home, now = self._inputs[i][m], self.at(m)
        self._saved[i, m] = form = self._forms[m]
        if home.memory is not None:
            _view(home.memory, form).copy_(now)
            return
        stage = self._free.get()
        _view(stage, form).copy_(now)
        self._writes[i, m] = self._homes.write(
            home, stage[: self._whole(now)], lambda: self._free.put(stage)
        )

    def load(self, i: int, m: int, ahead: Sequence[tuple[int, int]]) -> Tensor:
        """The input of unit i, until the next `load`; those of `ahead` are wanted next, in order.

        Raises DiskReadError, DiskWriteError.
        """
        if self._held:
            self._drop()
        for unit, batch in [(i, m), *ahead][: STAGES - 1]:
            if all(key != (unit, batch) for key, *_ in self._reads):
                self._read(unit, batch)
        home = self._inputs[i][m]
        if home.memory is not None:
            return _view(home.memory, self._saved[i, m])
        _, stage, read = self._reads[0]
        self._held = True
        read.result()
        return _view(stage, self._saved[i, m])

    def stop(self) -> None:
        """Wait for all that is on its way, and forget it."""
        for write in self._writes.values():
            write.exception()
        self._writes.clear()
        while self._reads:
            self._drop()

    def _read(self, i: int, m: int) -> None:
        home = self._inputs[i][m]
        if home.memory is None:
            self._writes.pop((i, m)).result()
            stage = self._free.get()
            nbytes = self._whole(_view(stage, self._saved[i, m]))
            self._reads.append(((i, m), stage, self._homes.read(home, stage[:nbytes])))

    def _drop(self) -> None:
        _, stage, read = self._reads.popleft()
        self._held = False
        read.exception()
        self._free.put(stage)

    @staticmethod
    def _whole(x: Tensor) -> int:
        return round_up(x.nbytes, PAGE)


def _view(memory: Tensor, form: _Form) -> Tensor:
    shape, dtype = form
    # `data`: with a version counter of its own, not that of the whole arena.
    return memory[: shape.numel() * dtype.itemsize].view(dtype).view(shape).data
