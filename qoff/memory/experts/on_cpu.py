"""CpuExperts: experts that stay in host memory, where the CPU computes with them.

They come to the device for passes of many tokens alone (`passing`). Those of a layer lie one behind
the other, in the CPU's packing.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from qoff.checkpoint import Checkpoint, TensorEntry
from qoff.kernels.layout.qexperts import QExperts
from qoff.memory.arena import Arena
from qoff.memory.io.transfers import Transfers, UnitRead
from qoff.memory.io.workers import Workers
from qoff.memory.plan import Residency
from qoff.memory.plan.experts import CPU_PACKING, LayerExperts

T = TypeVar("T")
AHEAD = 2  # batches of pairs that the thread is given: one is computed, the next one waits


@dataclass(frozen=True, eq=False)
class CpuLayer:
    """Those of a layer."""

    table: Tensor  # int64 [experts]: the place of each of them among these, -1 for the others
    gate_up: QExperts
    down: QExperts
    biases: tuple[Tensor | None, ...]  # of both, float32 [places, rows]
    memory: Tensor  # uint8 [places, bytes]
    experts: LayerExperts  # how they lie there


class CpuExperts:
    """The experts of a residency that the CPU computes, loaded, and the thread that does it.

    pairs: of a token and an expert that it has computed. Raises DiskReadError.
    """

    def __init__(
        self, checkpoint: Checkpoint, residency: Residency, arena: Arena, transfers: Transfers
    ) -> None:
        self.layers: dict[int, CpuLayer] = {}
        self.pairs = 0
        self.clock, self._transfers = transfers.clock, transfers
        self._passing_from = residency.passing_from
        self._workers: Workers | None = None  # once there is something to do
        bias_bytes = residency.cpu_bias_bytes
        self._biases = arena.alloc(bias_bytes, "biases of experts").view(torch.float32)
        numbers: dict[int, list[int]] = {}
        for one in sorted(residency.cpu_experts, key=lambda one: (one.layer, one.number)):
            numbers.setdefault(one.layer, []).append(one.number)
        reads: list[UnitRead] = []
        for layer, some in numbers.items():
            experts = LayerExperts(checkpoint.layers[layer], CPU_PACKING)
            nbytes = len(some) * experts.nbytes
            memory = arena.alloc(nbytes, "experts for the CPU").view(len(some), -1)
            for number, part in zip(some, memory, strict=True):
                image = experts.image(number)
                reads.append(transfers.load_host(image, part[: image.nbytes], verify=False))
            self.layers[layer] = self._layer(layer, experts, some, memory)
        for read in reads:
            read.finish()

    def computes(self, tokens: int) -> bool:
        """Whether it computes for a pass of so many tokens, for which none come to the device."""
        return self._passing_from is None or tokens < self._passing_from

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Have the thread make a call, after those before."""
        if self._workers is None:
            self._workers = self.clock.workers(1, "qoff-experts")
        return self._workers.submit(call)

    def join(self, future: Future[T]) -> T:
        """Wait for what comes of a call. Raises what went wrong."""
        workers = self._workers
        assert workers is not None
        self.clock.join([future], lambda: workers.alive, "the thread that computes experts died")
        return future.result()

    def close(self) -> None:
        """End the thread when it is done with its call, and forget the experts."""
        if self._workers is not None:
            self._workers.close()
        self.layers.clear()

    def _layer(
        self, layer: int, experts: LayerExperts, numbers: list[int], memory: Tensor
    ) -> CpuLayer:
        table = torch.full((experts.count,), -1)
        table[numbers] = torch.arange(len(numbers))
        prefix = f"model.layers.{layer}.mlp.experts."
        biases = tuple(self._bias(experts, prefix + name, numbers) for name in experts.matrices)
        return CpuLayer(table, *experts.in_slots(memory), biases, memory, experts)

    def _bias(self, experts: LayerExperts, name: str, numbers: list[int]) -> Tensor | None:
        """Those of a matrix of some experts, float32 [places, rows]; None where it has none."""
        entry = experts.file.weights.get(f"{name}.bias")
        if entry is None:
            return None
        assert isinstance(entry, TensorEntry)
        some = self._transfers.read_floats(experts.file, entry).view(experts.count, -1)[numbers]
        memory, self._biases = self._biases.split([some.numel(), len(self._biases) - some.numel()])
        return memory.view(some.shape).copy_(some)
