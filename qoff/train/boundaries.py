"""Hidden states between units: those at work, and what each unit was given, for its backward."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import chain
from typing import TypeAlias

import torch
from torch import Tensor

from qoff.memory.arena import PAGE, round_up

from .homes import Home, Link, Read

STAGES = 3  # on their way to where they are kept, or from there
STAGES_WITHOUT_COLUMN = 6  # an input and a gradient at work, the next two, two on their way out
_Form: TypeAlias = tuple[torch.Size, torch.dtype]
_Key: TypeAlias = tuple[int, int]  # unit and micro-batch


def _none(i: int, m: int) -> bool:
    return False


class Boundaries:
    """What each unit is given, and the gradients of that, for each micro-batch.

    column: memory for the hidden states, or gradients, that are at work, one for each micro-batch;
    empty where those have no room: then a unit reads its input from where that is kept, and
    gradients have homes, too. homes: of inputs by unit and micro-batch, and of gradients behind
    those where there is no column. stages: for those that are not here.
    """

    def __init__(
        self,
        link: Link,
        column: Sequence[Tensor],
        inputs: Sequence[Sequence[Home]],
        stages: Sequence[Tensor],
    ) -> None:
        self._link, self._column, self._inputs = link, column, inputs
        self._gradients = len(inputs) - (not column)  # the number of their row, where they have one
        self._free: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        for stage in stages:
            self._free.put(stage)
        self._most = len(stages) - (1 if column else 2)  # reads at once
        self._writes: dict[_Key, Future[None]] = {}
        self._reads: dict[_Key, tuple[Tensor, Read]] = {}
        self._held: list[_Key] = []  # of the reads, by who called `_load`
        self._forms: dict[int, _Form] = {}  # of what is in the column
        self._saved: dict[_Key, _Form] = {}  # of inputs and gradients, by unit and micro-batch

    def put(self, i: int, m: int, hidden: Tensor) -> Tensor:
        """Take what unit i will be given; returns a copy, that stays until anything is asked for.

        Raises DiskWriteError.
        """
        if not self._column:
            return self._keep((i, m), hidden.detach())
        self._forms[m] = hidden.shape, hidden.dtype
        place = self._at(m)
        place.copy_(hidden.detach())
        return place

    def put_gradient(self, m: int, grad: Tensor) -> None:
        """Take the gradient of what a unit was given. Raises DiskWriteError."""
        self.put(self._gradients, m, grad)

    def forms(self, count: int) -> list[_Form]:
        """Shapes and dtypes of what unit 0 is given, of so many micro-batches."""
        return [self._forms[m] if self._column else self._saved[0, m] for m in range(count)]

    def given(self, i: int, m: int, ahead: Iterable[_Key]) -> Tensor:
        """What unit i is given, until the next call; those of `ahead` are wanted next, in order.

        Raises DiskReadError, DiskWriteError.
        """
        return self._at(m) if self._column else self._load([(i, m)], ahead, again=True)[0]

    def save(self, i: int, m: int) -> None:
        """Keep what unit i is given, for `back`."""
        if self._column:
            self._keep((i, m), self._at(m))

    def back(
        self, i: int, m: int, ahead: Sequence[_Key], kept: Callable[[int, int], bool] = _none
    ) -> tuple[Tensor | None, Tensor]:
        """The input of unit i, and the gradient behind it, until the next call.

        kept: whether an input is elsewhere; None then. Raises DiskReadError, DiskWriteError.
        """
        x, *after = [[] if kept(*key) else [key] for key in ((i, m), *ahead)]
        if self._column:
            found = self._load(x, chain.from_iterable(after))
            return found[0] if found else None, self._at(m)
        behind = [[*key, (self._gradients, n)] for key, (_, n) in zip(after, ahead, strict=True)]
        *found, grad = self._load([*x, (self._gradients, m)], chain.from_iterable(behind))
        return found[0] if found else None, grad

    def gradient(self, m: int) -> Tensor:
        """That of what unit 0 was given, until the next call."""
        return self._at(m) if self._column else self._load([(self._gradients, m)], ())[0]

    def stop(self) -> None:
        """Wait for all that is on its way, and forget it."""
        for write in self._writes.values():
            write.exception()
        self._writes.clear()
        self._saved.clear()
        self._held.clear()
        for key in list(self._reads):
            self._drop(key)

    def _at(self, m: int) -> Tensor:
        return _view(self._column[m], self._forms[m])

    def _keep(self, key: _Key, now: Tensor) -> Tensor:
        home = self._home(key)
        self._saved[key] = form = now.shape, now.dtype
        memory = self._link.here(home)
        if memory is not None:
            place = _view(memory, form)
            place.copy_(now)
            return place
        stage = self._free.get()
        place = _view(stage, form)
        place.copy_(now)
        # Without a column the caller computes with what is on the stage.
        give_back = self._give_back if self._column else self._free.put
        self._writes[key] = self._link.write(
            home, stage[: round_up(now.nbytes, PAGE)], partial(give_back, stage)
        )
        return place

    def _load(
        self, wanted: Sequence[_Key], ahead: Iterable[_Key], again: bool = False
    ) -> list[Tensor]:
        """again: they will be asked for once more."""
        while self._held:
            self._drop(self._held.pop())
        for key in wanted:
            if self._here(key) is None and key not in self._reads:
                self._read(key, again)
        for key in ahead:
            if self._here(key) is not None or key in self._reads:
                continue
            # A gradient is there again when the unit before has made it.
            if len(self._reads) >= self._most or key not in self._writes:
                break
            self._read(key, again)
        return [self._view(key) for key in wanted]

    def _view(self, key: _Key) -> Tensor:
        memory = self._here(key)
        if memory is None:
            memory, read = self._reads[key]
            self._held.append(key)
            read.result()
        return _view(memory, self._saved[key])

    def _read(self, key: _Key, again: bool) -> None:
        (self._writes[key] if again else self._writes.pop(key)).result()
        stage, (shape, dtype) = self._free.get(), self._saved[key]
        nbytes = round_up(shape.numel() * dtype.itemsize, PAGE)
        self._reads[key] = stage, self._link.read(self._home(key), stage[:nbytes])

    def _drop(self, key: _Key) -> None:
        stage, read = self._reads.pop(key)
        read.exception()
        self._give_back(stage)

    def _give_back(self, stage: Tensor) -> None:
        self._link.spoil(stage)
        self._free.put(stage)

    def _here(self, key: _Key) -> Tensor | None:
        return self._link.here(self._home(key))

    def _home(self, key: _Key) -> Home:
        i, m = key
        return self._inputs[i][m]


def _view(memory: Tensor, form: _Form) -> Tensor:
    shape, dtype = form
    # `data`: with a version counter of its own, not that of the whole arena.
    return memory[: shape.numel() * dtype.itemsize].view(dtype).view(shape).data
