"""What an `LLM` runs on where a model runs through transformers' modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qoff.checkpoint import Checkpoint
from qoff.errors import ArgumentError, BudgetError
from qoff.kvcache.quant import UnpackableError
from qoff.kvcache.store.placement import DEVICE, HOST
from qoff.memory import Transfers
from qoff.memory.io.cuda_transfers import CudaTransfers
from qoff.models.modules.decoder import ModuleDecoder
from qoff.models.modules.own_caches import OwnCaches
from qoff.models.modules.slots import ModuleSlots, SlotStates
from qoff.models.runtime import AnyDecoder, Runtime
from qoff.plan import Memory, Plan
from qoff.plan.modules import memory_of_modules

from .executor import CpuExecutor, Executor


class OfModules(Executor):
    """A device, for transformers' modules.

    Raises ArgumentError for a plan that parks hidden states, which are the modules' own, and for
    one that shares prefixes of what is not packed.
    """

    def __init__(self, *arguments: Any, trust_remote_code: bool, **options: Any) -> None:
        self._trusted = trust_remote_code
        super().__init__(*arguments, **options)

    @property
    def _layer_numbers(self) -> Sequence[int]:
        return range(len(self.shapes))

    def _states(self) -> SlotStates:
        """What a batch keeps beside packed blocks."""
        decoder, sizes = self._decoder, (self.plan.batch_size, self.plan.context)
        attention = [*decoder.packed_shapes]
        return SlotStates(decoder.text_config, self._held.layers, attention, *sizes, self.device)

    def _open(self, checkpoint: Checkpoint, transfers: Transfers, packing: str) -> Runtime:
        plan, options = self.plan, self._options(transfers)
        for what, given in (("draft_tokens", plan.draft_tokens), ("adapters", self._adapter_paths)):
            if given:
                raise ArgumentError(
                    f"{what}: needs an architecture that qoff computes itself; this model runs "
                    "through transformers' modules"
                )
        if plan.activations != DEVICE:
            raise ArgumentError(
                "transformers' modules keep their hidden states on the device; use "
                f"activations='device', not {plan.activations!r}"
            )

        def host_memory(decoder: AnyDecoder) -> int | None:
            self._settle(decoder)
            return self._memories[0].left(HOST, plan.host_memory)

        def reserves(decoder: AnyDecoder) -> list[tuple[int, int]]:
            inside = self._decoder.outer_bytes  # counted by the runtime, too
            whole, tiled = (memory.total(DEVICE) - inside for memory in self._memories)
            return [(whole, tiled)]

        options |= {"trust_remote_code": self._trusted, "reserves": reserves}
        options |= {"device_memory": plan.device_memory, "host_memory": host_memory}
        try:
            runtime = self._runtime(checkpoint, **options)
        except BudgetError as error:
            if error.least is not None:
                self._memories[0].left(DEVICE, plan.device_memory, error.least)
            raise
        self.memory = self._memories[runtime.residency.in_parts]
        on_host = self.memory.total(HOST)
        if self.device.type == "cpu":
            on_host += runtime.residency.workspace
        self._check_free(on_host)
        return runtime

    def _settle(self, decoder: AnyDecoder) -> None:
        """Find what a model takes beside its weights, whole and in tiles."""
        assert isinstance(decoder, ModuleDecoder)
        self.limits = self._decoder = decoder
        self.shapes = tuple(decoder.packed_shapes.values())
        self.forms = self.plan.kv.packed_forms(self.shapes)
        self._held = decoder.sequence_memory()
        self.whole_prompts = self._held.whole_prompts
        if self.plan.share_prefixes and not (self._held.is_empty and self.shapes):
            raise ArgumentError(
                f"share_prefixes needs a KV cache that is packed, and {decoder.cache_shapes[0]} "
                "has one that is not, or recurrent states; leave share_prefixes out"
            )
        self._memories = [self.memory_of(self.plan, tiled) for tiled in (False, True)]


class ModuleExecutor(OfModules, CpuExecutor):
    """A CPU, or a GPU for models whose attention cannot be replaced.

    Elsewhere K and V are packed as the plan says; what is not packed is on the device as the
    modules compute it, like recurrent states.
    """

    def new_cache(self) -> ModuleSlots | OwnCaches:
        # Without packed layers there are no blocks.
        window = {} if self.shapes else {"window": self.plan.context, "sinks": 0}
        if self._held.alone:
            return self._new_cache(self._decoder.own_caches, **window)
        lent, states = self._decoder.lent, self._states()
        return self._new_cache(ModuleSlots, lent=lent, states=states, **window)

    def _runtime(self, checkpoint: Checkpoint, **options: Any) -> Runtime:
        on_gpu = self.instrumentation.ops_for(self.device).CACHE == "device"
        try:
            return Runtime(checkpoint, kv=None if on_gpu else self.plan.kv, **options)
        except UnpackableError:
            return Runtime(checkpoint, kv=None, **options)

    def _transfers(self) -> Transfers:
        if self.device.type != "cuda":
            return super()._transfers()
        return CudaTransfers(self.device, self._new_reader())

    def memory_of(self, plan: Plan, tiled: bool = False) -> Memory:
        return memory_of_modules(plan, self._decoder, self._held, tiled)
