"""The executors on a machine in virtual time, for models of which only the sizes are known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from qoff.budgets import CPU
from qoff.checkpoint import Checkpoint, QuantEntry, WeightFile
from qoff.engine.executor import AnyCache, CpuExecutor, Executor
from qoff.engine.gpu_executor import GpuExecutor
from qoff.kernels.cpu.packed_attention.places import Moves, Origins
from qoff.kernels.layout.ragged import Ragged
from qoff.kvcache import PackedCache
from qoff.kvcache.device.blocks import DeviceBlocks
from qoff.kvcache.device.write_back import WriteBackQueue
from qoff.kvcache.host.packed import PackedPass
from qoff.kvcache.stateful import StatefulCache, StatefulPass
from qoff.kvcache.store.tiered import TieredBlocks
from qoff.memory import DiskReader, Transfers
from qoff.memory.instrumentation import Instrumentation
from qoff.memory.io.copies import Copies
from qoff.memory.io.cuda_transfers import CudaTransfers
from qoff.memory.io.spill import SpillFile
from qoff.memory.io.thread_transfers import ThreadTransfers
from qoff.memory.plan import EMBEDDING, PER_LAYER, is_expert
from qoff.models.native.decoder import Decoder
from qoff.models.runtime import Runtime
from qoff.plan import Memory, Plan
from qoff.plan.calls import call_s, pass_s
from qoff.plan.gpu import memory_on_gpu
from qoff.plan.profile import MachineProfile

from .experts import Router, SimulatedLayer
from .machine import VirtualMachine
from .moves import SimulatedMoves
from .ops import SimulatedOps
from .transfers import (
    SimulatedCopies,
    SimulatedReader,
    SimulatedReads,
    SimulatedSpill,
    SimulatedStream,
    SimulatedWriteBack,
    unbacked,
)


def _matrices(checkpoint: Checkpoint) -> int:
    """Of the layer that has most, without its experts."""

    def count(file: WeightFile) -> int:
        weights = file.weights.items()
        return sum(isinstance(e, QuantEntry) and not is_expert(name) for name, e in weights)

    return max(map(count, checkpoint.layers))


def open_simulated(
    checkpoint: Checkpoint,
    plan: Plan,
    machine: VirtualMachine,
    own: ExitStack,
    router: Router | None = None,
) -> Executor:
    """What a plan says, opened on a machine in virtual time; `own` closes it.

    checkpoint: whose files need not be there. router: of a mixture. Raises as `Executor` does.
    """
    kind = _SimulatedGpu if machine.profile.on_gpu else _SimulatedCpu
    return kind(machine, checkpoint, plan, own, router)


class _Simulated(Executor):
    """Stand-ins for what moves bytes and for what computes; all else is the executor's."""

    def __init__(
        self,
        machine: VirtualMachine,
        checkpoint: Checkpoint,
        plan: Plan,
        own: ExitStack,
        router: Router | None,
    ) -> None:
        self.machine, self._router = machine, router
        self.simulated_ops = ops = SimulatedOps(machine, _matrices(checkpoint))
        units = len(checkpoint.layers) + 1
        spilled = plan.activations == "disk"
        ops.pass_s = float(pass_s(machine.profile, np.asarray(plan.batches), units, spilled))
        ops.call_s = call_s(machine.profile)
        hooks = Instrumentation(
            clock=machine.clock,
            ops=ops,
            pages=unbacked,
            check_memory=lambda *_: None,
            expert_moves=partial(SimulatedMoves, machine),
            repack=ops.repack_experts,
        )
        super().__init__(
            checkpoint,
            plan,
            own,
            device=CPU,
            dtype=torch.float16 if machine.profile.on_gpu else torch.float32,
            packing=ops.PACKING,
            instrumentation=hooks,
        )

    def _new_reader(self) -> DiskReader:
        return SimulatedReader(self.machine)

    def _new_copies(self) -> Copies:
        return SimulatedCopies(self.machine, instrumentation=self.instrumentation)

    def _new_spill(self, folder: Path, nbytes: int) -> SpillFile:
        hooks = self.instrumentation
        return SimulatedSpill(self.machine, folder, nbytes, self._reader, instrumentation=hooks)

    def _runtime(self, checkpoint: Checkpoint, **options: Any) -> Runtime:
        found = _SimulatedRuntime(checkpoint, verify=False, **options)
        found.ops, decoder = self.simulated_ops, found.decoder
        if self._router is not None and isinstance(decoder, Decoder):
            bits = self.plan.activation_bits
            decoder.layer = SimulatedLayer(decoder, found.ops, self._router, bits)
        return found


_Store = TypeVar("_Store", TieredBlocks, DeviceBlocks)


def _virtual(stores: Sequence[_Store]) -> Sequence[_Store]:
    """The same, whose blocks hold nothing."""
    for blocks in stores:
        if blocks.bounds is not None:
            blocks.bounds.virtual = True
    return stores


class _SimulatedCpu(_Simulated, CpuExecutor):
    def _open_blocks(self) -> Sequence[TieredBlocks]:
        return _virtual(super()._open_blocks())

    def _new_cache(self, kind: Callable[..., AnyCache], **more: Any) -> AnyCache:
        simulated: Any = _SimulatedStates if "states" in more else _SimulatedCache
        return super()._new_cache(partial(simulated, self.machine), **more)

    def _transfers(self) -> Transfers:
        return _SimulatedThreads(self.machine)

    def memory_of(self, plan: Plan, tiled: bool = False) -> Memory:
        cores = self.machine.profile.cores
        return Memory.of(plan, self.spec, self.shapes, tiled, cores)


class _SimulatedGpu(_Simulated, GpuExecutor):
    def _open_blocks(self) -> Sequence[DeviceBlocks]:
        return _virtual(super()._open_blocks())

    def _transfers(self) -> Transfers:
        return _SimulatedStreams(self.machine)

    def _machine(self, plan: Plan, checkpoint: Checkpoint) -> MachineProfile:
        return self.machine.profile

    def memory_of(self, plan: Plan, tiled: bool = False) -> Memory:
        recorded = plan.batch_size  # as on a GPU that is there
        return memory_on_gpu(plan, self.spec, self.shapes, self.device, self.dtype, tiled, recorded)

    def _new_queue(self, *arguments: Any) -> WriteBackQueue:
        return SimulatedWriteBack(self.machine, *arguments)


class _SimulatedStreams(SimulatedReads, CudaTransfers):
    """Transfers to a GPU."""

    def __init__(self, machine: VirtualMachine) -> None:
        stream = SimulatedStream(machine)
        super().__init__(CPU, SimulatedReader(machine), stream=lambda device: stream)
        self._machine = machine

    def save(self, memory: Tensor, host: Tensor) -> None:
        self._machine.from_device.ask()
        self._machine.from_device.start(memory.nbytes)


class _SimulatedThreads(SimulatedReads, ThreadTransfers):
    """Transfers beside a CPU."""

    def __init__(self, machine: VirtualMachine) -> None:
        super().__init__(SimulatedReader(machine))
        self._machine = machine

    def in_place(self, instrumentation: Instrumentation) -> bool:
        return True

    def _new_copies(self, instrumentation: Instrumentation) -> Copies:
        return SimulatedCopies(self._machine, instrumentation=instrumentation)


class _SimulatedRuntime(Runtime):
    """Embeds without looking at weights that are in memory."""

    ops: SimulatedOps

    def _embed(self, ids: Tensor, scale: float = 1.0) -> Tensor:
        self.ops.begin_pass()
        if self.store.holds(EMBEDDING):
            return torch.empty(len(ids), self.spec.hidden_size)
        return super()._embed(ids, scale)

    def _embed_layers(self, ids: Tensor, scale: float) -> Tensor:
        if self.store.holds(PER_LAYER):
            return torch.empty(len(ids), self.spec.per_layer_width)
        return super()._embed_layers(ids, scale)


class _SimulatedCache(PackedCache):
    """Blocks in their places, without tokens."""

    def __init__(self, machine: VirtualMachine, *arguments: Any, **options: Any) -> None:
        self.machine = machine
        super().__init__(*arguments, **options)

    def start(self, ragged: Ragged, slots: Sequence[int] | None = None) -> PackedPass:
        return _SimulatedPass(self, ragged, slots)


class _SimulatedPass(PackedPass):
    _cache: _SimulatedCache

    @property
    def in_place(self) -> bool:
        return False  # there are no jobs

    def _pack_blocks(
        self, layer: int, tokens: tuple[Tensor, Tensor], origins: Origins, records: Tensor
    ) -> None:
        shape, machine = self._cache.shapes[layer], self._cache.machine
        nbytes = len(origins.rows) * 64 * shape.kv_heads * shape.cached_width * tokens[0].itemsize
        machine.compute(nbytes / machine.profile.device.bytes_per_s)

    def _move_tokens(
        self, tokens: tuple[Tensor, Tensor], to: tuple[Tensor, Tensor], moves: Moves
    ) -> None:
        """There are no tokens."""


class _SimulatedStates(_SimulatedCache, StatefulCache):
    """With states beside the blocks."""

    def start(self, ragged: Ragged, slots: Sequence[int] | None = None) -> _SimulatedStatefulPass:
        return _SimulatedStatefulPass(self, ragged, slots)


class _SimulatedStatefulPass(StatefulPass, _SimulatedPass):
    _cache: _SimulatedStates
