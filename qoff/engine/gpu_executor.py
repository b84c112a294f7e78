"""What an `LLM` runs on where the device is a GPU."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from qoff.checkpoint import Checkpoint
from qoff.kernels.triton.linear.scratch import Scratch
from qoff.kvcache import DeviceCache, KVPlacement
from qoff.kvcache.device.blocks import DeviceBlocks, open_device_blocks
from qoff.kvcache.device.write_back import WriteBackQueue
from qoff.kvcache.stateful import device_cache
from qoff.kvcache.store.tiered import TieredBlocks
from qoff.memory import ThreadTransfers, Transfers
from qoff.memory.io.cuda_transfers import CudaTransfers
from qoff.models.modules.configs import is_native
from qoff.models.native.caches import new_states
from qoff.models.spec import DecoderSpec
from qoff.plan import Memory, Plan
from qoff.plan.cost import CostModel
from qoff.plan.gpu import check_gpu_plan, decided_on_gpu, memory_on_gpu
from qoff.plan.gpu_scratch import scratch_sizes
from qoff.plan.machine import known_profile
from qoff.plan.native_sizes import NativeSizes
from qoff.plan.profile import MachineProfile
from qoff.plan.workload import Workload

from .executor import AnyCache, Executor


class GpuExecutor(Executor):
    """A GPU with pinned host memory beside it; or the CPU in its place, for tests of its ops."""

    stores: Sequence[DeviceBlocks]
    _moves_adapters = True

    @property
    def blocks(self) -> DeviceBlocks:
        """Those of the first group of layers, which keeps all of them if any does."""
        return self.stores[0]

    @property
    def kv_wait_s(self) -> float:
        offloaded, prefetcher = self.blocks.offloaded, self.blocks.prefetcher
        read = offloaded.ring.wait_s if isinstance(offloaded, TieredBlocks) else 0.0
        return read + (0.0 if prefetcher is None else prefetcher.ring.wait_s)

    def _decided(self, plan: Plan, checkpoint: Checkpoint) -> Plan:
        if is_native(checkpoint.config):
            plan = decided_on_gpu(plan, DecoderSpec.from_config(checkpoint.config))
        if not plan.cpu_experts or plan.cpu_expert_tokens is not None:
            return plan
        sizes = NativeSizes.of_checkpoint(checkpoint)
        machine = self._machine(plan, checkpoint)
        cost = CostModel(sizes, machine, Workload(), plan.kv, self.dtype.itemsize)
        if cost.mixture is None:  # which `Runtime` refuses
            return plan
        together = plan.batches if plan.schedule == "block" else 1
        return replace(plan, cpu_expert_tokens=cost.cpu_expert_tokens(together))

    def _machine(self, plan: Plan, checkpoint: Checkpoint) -> MachineProfile:
        """What was measured of this one; without that, rates that most machines reach."""
        folder = plan.spill_folder or Path(tempfile.gettempdir())
        return known_profile(self.device, checkpoint.path, folder)

    def new_cache(self) -> DeviceCache:
        return self._new_cache(
            device_cache,
            steady=self.instrumentation.records(self.device),
            lent=self.spec.lent_layers,
            states=new_states(self.spec, self.plan.batch_size, self.device, self.plan.draft_tokens),
        )

    def _new_cache(self, kind: Callable[..., AnyCache], **more: Any) -> AnyCache:
        return super()._new_cache(kind, device=self.device, dtype=self.dtype, **more)

    def _transfers(self) -> Transfers:
        check_gpu_plan(self.plan)
        reader = self._new_reader()
        if self.device.type != "cuda":
            return ThreadTransfers(reader)
        return CudaTransfers(self.device, reader)

    def _options(self, transfers: Transfers) -> dict[str, Any]:
        return {**super()._options(transfers), "scratch": self._new_scratch()}

    def _new_scratch(self) -> Scratch | None:
        """Where matrices are dequantized; None: as `Runtime` makes one, which keeps nothing."""
        sizes = scratch_sizes(self.plan, self.spec, self.device, self.dtype)
        return Scratch(sizes.piece, sizes.held)

    def memory_of(self, plan: Plan, tiled: bool = False) -> Memory:
        recorded = plan.batch_size if self.instrumentation.records(self.device) else 0
        return memory_on_gpu(plan, self.spec, self.shapes, self.device, self.dtype, tiled, recorded)

    def _open_blocks(self) -> Sequence[DeviceBlocks]:
        assert self.memory.on_gpu is not None
        return [
            open_device_blocks(
                [self.forms[layer] for layer in group.layers],
                [self.shapes[layer].kv_heads for layer in group.layers],
                plan,
                KVPlacement() if group.reach else self.plan.kv_placement,
                dict(self.arenas),
                self._copies,
                self._spill,
                layers=[self._layer_numbers[layer] for layer in group.layers],
                always_move=not self.plan.attends_on_cpu,
                instrumentation=self.instrumentation,
                new_queue=self._new_queue,
            )
            for group, plan in self.memory.on_gpu.groups
        ]

    def _new_queue(self, *arguments: Any) -> WriteBackQueue:
        return WriteBackQueue(*arguments)
