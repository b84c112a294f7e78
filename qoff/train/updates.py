"""Updates beside the backward pass: one thread steps units whose gradients are complete."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from torch import Tensor

from qoff.kernels.cpu.optim.update import Moments, Rule, update
from qoff.memory.io.workers import Workers

from .factored import FactoredPart, Run
from .homes import Home, Homes
from .layout import FlatUnit, StateForm
from .optimizers import FactoredRule

BUFFERS = 3  # pieces of states on their way: one is read, one changed, one written


class Updater:
    """Steps units one after another; the states of those on disk pass through a few buffers.

    states: by unit, the home of each piece. buffers: each as large as the largest piece. factored:
    by unit, its part of moments that stay in memory, if there are any.
    """

    def __init__(
        self,
        homes: Homes,
        forms: Sequence[StateForm],
        states: Sequence[Sequence[Home]],
        buffers: Sequence[Tensor],
        factored: Sequence[FactoredPart | None],
    ) -> None:
        self._factored = factored
        self._homes, self._forms, self._states = homes, forms, states
        self._free: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        for buffer in buffers:
            self._free.put(buffer)
        self._last: Future[None] | None = None
        self._worker = Workers(1, "qoff-train")

    def begin(self, i: int, unit: FlatUnit, weights: Tensor) -> None:
        """Write the states of a unit before the first step. weights: flat."""
        factored = self._factored[i]
        if factored is not None:
            factored.moments.begin(factored.runs, weights)
        for (start, stop), home in zip(unit.pieces, self._states[i], strict=True):
            buffer = self._free.get() if home.memory is None else home.memory
            self._forms[i].begin(buffer, weights[start:stop])
            if home.memory is None:
                source = buffer[: home.nbytes]
                self._homes.write(home, source, partial(self._give_back, buffer)).result()

    def submit(
        self,
        i: int,
        unit: FlatUnit,
        rule: Rule | FactoredRule,
        weights: Callable[[], Tensor],
        grad: Callable[[], Tensor],
        then: Callable[[], None],
    ) -> Future[None]:
        """Step a unit when those before it are done; then call `then`, whether it went well or not.

        What `weights` and `grad` return: flat. All are called in the worker's thread.
        """

        def work() -> None:
            try:
                self._step(i, unit, rule, weights(), grad())
            finally:
                then()

        self._last = self._worker.submit(work)
        return self._last

    def prepare(
        self,
        numbers: Sequence[int],
        rule: FactoredRule,
        grad: Callable[[int], Tensor],
        give_back: Callable[[int], None],
    ) -> Future[None]:
        """Before units of one matrix are stepped: its means, of the gradients of all of them.

        grad: of each, flat, until `give_back`; both are called in the worker's thread, two times.
        """
        found = [self._factored[i] for i in numbers]

        def parts() -> Iterator[tuple[Sequence[Run], Tensor]]:
            for i, part in zip(numbers, found, strict=True):
                assert part is not None
                try:
                    yield part.runs, grad(i)
                finally:
                    give_back(i)

        assert found[0] is not None
        work = partial(found[0].moments.prepare, rule, parts)
        self._last = self._worker.submit(work)
        return self._last

    def wait(self) -> None:
        """Wait until all units are done, well or not."""
        if self._last is not None:
            self._last.exception()

    def close(self) -> None:
        """Finish the unit at work and stop."""
        self._worker.close()

    def _step(
        self, i: int, unit: FlatUnit, rule: Rule | FactoredRule, weights: Tensor, grad: Tensor
    ) -> None:
        homes, apply = self._states[i], self._applied(i, rule, grad)
        reads: list[tuple[Tensor, Future[None]]] = []
        writes: list[Future[None]] = []
        try:
            for at, ((start, stop), home) in enumerate(zip(unit.pieces, homes, strict=True)):
                for ahead in homes[at + len(reads) : at + 2]:
                    if ahead.memory is None:
                        buffer = self._free.get()
                        reads.append((buffer, self._homes.read(ahead, buffer[: ahead.nbytes])))
                memory = home.memory
                if memory is None:
                    reads[0][1].result()
                    memory = reads[0][0]
                master, moments = self._forms[i].view(memory, stop - start)
                apply(at, weights[start:stop], master, grad[start:stop], moments)
                if home.memory is None:
                    buffer, _ = reads.pop(0)
                    source = buffer[: home.nbytes]
                    writes.append(self._homes.write(home, source, partial(self._give_back, buffer)))
        finally:
            for buffer, read in reads:
                read.exception()
                self._give_back(buffer)
        for write in writes:
            write.result()

    def _give_back(self, buffer: Tensor) -> None:
        self._homes.spoil(buffer)
        self._free.put(buffer)

    def _applied(self, i: int, rule: Rule | FactoredRule, grad: Tensor) -> Callable[..., None]:
        """What steps a piece of a unit: its number, weights, master, gradients and moments."""
        factored = self._factored[i]

        def dense(
            _: int, own: Tensor, master: Tensor | None, grad: Tensor, moments: Moments
        ) -> None:
            assert isinstance(rule, Rule)
            if master is None:
                update(rule, own, grad, moments)
            else:
                update(rule, master, grad, moments, own)

        def by_rows(at: int, own: Tensor, master: Tensor | None, *_: Any) -> None:
            assert isinstance(rule, FactoredRule)
            assert factored is not None
            wide = own if master is None else master
            copy = None if master is None else own
            factored.moments.step(rule, factored.runs[at], wide, grad, copy)

        if factored is None:
            return dense
        assert isinstance(rule, FactoredRule)
        if factored.alone:
            factored.moments.prepare(rule, lambda: [(factored.runs, grad)])
        return by_rows
