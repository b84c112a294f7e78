"""PassingExperts: experts for the CPU on their way through the device, for passes of many tokens.

They are copied in groups, as they lie in host memory, to two places by turns, and repacked to a
third one when they are computed with. A place takes the next group as soon as it is repacked, so
that the link carries one group while another one is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from qoff.interrupts import whole
from qoff.kernels.layout.qexperts import QExperts
from qoff.memory.arena import Arena
from qoff.memory.io.transfers import Mark, Transfers, UnitRead
from qoff.memory.plan import Residency
from qoff.memory.plan.experts import LayerExperts, passing_parts

from .on_cpu import CpuExperts
from .state import NEARLY_ALL
from .wave import ExpertWave, bias_memory


@dataclass(eq=False)
class _Place:
    """Memory for a group of experts as the CPU has them, and what comes there."""

    memory: Tensor  # uint8
    mark: Mark
    layer: int = -1
    numbers: tuple[int, ...] = ()
    reads: list[UnitRead] = field(default_factory=list)


class PassingExperts:
    """Brings groups of `CpuExperts` for one pass, or round of passes, at a time.

    experts: of all layers, in the device's packing. repack: as `repack_experts`, on the current
    stream. passed: experts that were brought, guesses of the next layer's included. nbytes: of
    these.
    """

    def __init__(
        self,
        experts: Sequence[LayerExperts],
        on_cpu: CpuExperts,
        residency: Residency,
        arena: Arena,
        transfers: Transfers,
        repack: Callable[[QExperts, QExperts], None],
    ) -> None:
        self._experts, self._on_cpu, self._together = experts, on_cpu, residency.passing
        self._transfers, self._repack = transfers, repack
        self.passed = self.nbytes = 0
        layers = [layer.experts for layer in on_cpu.layers.values()]
        raw, placed, bias = passing_parts(self._together, experts, layers)
        self._placed = arena.alloc(placed, "experts that pass")
        self._bias = arena.alloc(bias, "biases of experts that pass")
        memories = [arena.alloc(raw, "experts on their way") for _ in range(2)]
        self._free = [_Place(memory, transfers.recycle(memory)) for memory in memories]
        self._coming: list[_Place] = []  # in the order of their copies
        self._asked = (-1, 0)  # the layer, and how many a round has asked for of it

    def ask(self, layer: int, numbers: Sequence[int]) -> None:
        """Start to bring experts of a layer, in this order, as far as there is room."""
        if self._asked[0] != layer or self._asked[1] < len(numbers):
            self._asked = (layer, len(numbers))
        with whole():
            self._begin(layer, numbers)

    def next(self, layer: int, numbers: Sequence[int]) -> ExpertWave:
        """The next group of what `ask` has begun to bring, in the order of the current stream.

        Waits for nothing but copies in threads. Raises what went wrong in these.
        """
        wanted = set(numbers)
        place = next(p for p in self._coming if p.layer == layer and wanted.intersection(p.numbers))
        try:
            for read in place.reads:
                read.wait()
        except Exception:
            with whole():
                self._drop(place)
            raise
        count = len(place.numbers)
        here = self._on_cpu.layers[layer].experts
        packed = place.memory[: count * here.nbytes].view(count, here.nbytes)
        own = self._experts[layer]
        memory = self._placed[: self._together * own.nbytes].view(self._together, own.nbytes)
        for one, into in zip(here.in_slots(packed), own.in_slots(memory[:count]), strict=True):
            self._repack(one, into)
        table = torch.full((own.count,), -1)
        table[list(place.numbers)] = torch.arange(count)
        both = own.in_slots(memory)
        biases = bias_memory(self._bias, *both)
        group = ExpertWave(place.numbers, table, *both, biases, passing=True)
        with whole():
            self._give_back(place)
            self._begin(layer, [number for number in numbers if number not in group.numbers])
        return group

    def release(self) -> None:
        """Give the last group back."""
        if self._transfers.poison:
            self._transfers.recycle(self._placed)

    def close(self) -> None:
        """Forget everything; the transfers then stop what is under way."""
        self._coming.clear()
        self._free.clear()

    def _begin(self, layer: int, numbers: Sequence[int]) -> None:
        """Start as many groups as there is room for, then some of the next layer."""
        following, missing = self._following(layer), self._missing(layer, numbers)
        for place in list(self._coming):
            mine = place.layer == layer and not set(numbers).isdisjoint(place.numbers)
            if not mine and (missing or place.layer != following):
                self._drop(place)
        self._start(layer, numbers)
        if following is not None:
            self._start(following, _numbers(self._on_cpu, following))

    def _following(self, layer: int) -> int | None:
        """The layer whose experts will be wanted, too, if most of this one's are.

        Not the last one: of prompts, few tokens go on there.
        """
        layers = [*self._on_cpu.layers]
        asked, count = self._asked
        place = layers.index(layer) + 1
        if asked != layer or count < NEARLY_ALL * len(_numbers(self._on_cpu, layer)):
            return None
        return layers[place] if place < len(layers) - 1 else None

    def _missing(self, layer: int, numbers: Sequence[int]) -> list[int]:
        """Those that are neither there nor on their way."""
        there = {n for place in self._coming if place.layer == layer for n in place.numbers}
        return [number for number in numbers if number not in there]

    def _start(self, layer: int, numbers: Sequence[int]) -> None:
        """Start groups of what is missing of these, as far as there is room."""
        missing = self._missing(layer, numbers)
        while self._free and missing:
            self._start_group(layer, missing[: self._together])
            missing = missing[self._together :]

    def _start_group(self, layer: int, numbers: Sequence[int]) -> None:
        """Start to copy a group to the place that is free first: neighbours together."""
        of_layer, place = self._on_cpu.layers[layer], self._free.pop(0)
        nbytes, sources = of_layer.experts.nbytes, of_layer.table[list(numbers)].tolist()
        starts = [0, *(i + 1 for i, (a, b) in enumerate(pairwise(sources)) if b != a + 1)]
        place.layer, place.numbers = layer, tuple(numbers)
        self._coming.append(place)
        try:
            for first, stop in zip(starts, [*starts[1:], len(sources)], strict=True):
                source = of_layer.memory[sources[first] : sources[stop - 1] + 1].flatten()
                memory = place.memory[first * nbytes : stop * nbytes]
                image = of_layer.experts.image(numbers[first])
                place.reads.append(self._transfers.copy_unit(image, source, memory, place.mark))
        except BaseException:
            self._drop(place)
            raise
        self.passed += len(numbers)
        self.nbytes += len(numbers) * nbytes

    def _drop(self, place: _Place) -> None:
        """Have a place free, once nothing is written there any more."""
        for read in place.reads:
            read.abandon()
        for read in place.reads:
            read.settle()
        self._give_back(place)

    def _give_back(self, place: _Place) -> None:
        """Have a place free when what is on the current stream has ended."""
        place.mark = self._transfers.recycle(place.memory)
        place.layer, place.numbers, place.reads = -1, (), []
        self._coming.remove(place)
        self._free.append(place)


def _numbers(on_cpu: CpuExperts, layer: int) -> list[int]:
    """The experts of a layer that the CPU has, in the order in which they lie there."""
    return (on_cpu.layers[layer].table >= 0).nonzero()[:, 0].tolist()
