"""What an `LLM` runs on: weights, KV blocks, hidden states on three tiers, and what moves them."""

from __future__ import annotations

import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from qoff.checkpoint import Checkpoint
from qoff.errors import BudgetError
from qoff.kernels.layout.states import StateShape
from qoff.kernels.ops import release_scratch
from qoff.kvcache import PackedCache
from qoff.kvcache.device.blocks import DeviceBlocks
from qoff.kvcache.host.recent import RecentWorkspace
from qoff.kvcache.slots import SlotCache
from qoff.kvcache.stateful import StatefulCache
from qoff.kvcache.store.placement import DEVICE, DISK, HOST
from qoff.kvcache.store.pool import BlockPool
from qoff.kvcache.store.staging import Staging
from qoff.kvcache.store.tiered import TieredBlocks
from qoff.memory import DiskReader, Residency, ThreadTransfers, Transfers, plan_residency
from qoff.memory.activations import ActivationStore
from qoff.memory.arena import Arena, TierArenas
from qoff.memory.instrumentation import Instrumentation
from qoff.memory.io.copies import Copies
from qoff.memory.io.copy_stream import CopyStream
from qoff.memory.io.spill import SpillFile
from qoff.memory.plan import Layouts
from qoff.models.adapter_layers import Place
from qoff.models.adapters import Adapters
from qoff.models.forward_pass import LayerWorkspace
from qoff.models.native.caches import head_shapes, new_states
from qoff.models.native.decoder import Decoder
from qoff.models.runtime import Runtime
from qoff.models.spec import DecoderSpec
from qoff.plan import Memory, Plan
from qoff.system_memory import keep_large_apart

from .adapter_room import settled
from .admission import Limits

AnyCache = TypeVar("AnyCache", bound=SlotCache)


class Moved(NamedTuple):
    """What went over a link. seconds: in which it was busy."""

    nbytes: float
    seconds: float


class Executor(ABC):
    """Opens what a plan says on one kind of device; `own` closes it.

    dtype: of hidden states. packing: of weights that the device's ops read. Raises BudgetError with
    the bytes wanted by tier and purpose, and ArgumentError for a plan that does not go with the
    model or the device, before anything is loaded, and the errors of `Runtime`.
    """

    adapters: Adapters | None = None
    stores: Sequence[TieredBlocks] | Sequence[DeviceBlocks]  # of each group of layers
    limits: Limits
    memory: Memory  # what the plan takes beside the weights
    runtime: Runtime
    workspace: LayerWorkspace | None  # for one pass after another
    whole_prompts = False  # whether each prompt is read in one pass
    state_shapes: tuple[StateShape, ...] = ()  # of layers whose states are not the modules' own
    _moves_adapters = False  # whether those in host memory come to the device
    _near: frozenset[Place] = frozenset()  # matrices whose adapters are on the device

    def __init__(
        self,
        checkpoint: Checkpoint,
        plan: Plan,
        own: ExitStack,
        *,
        device: torch.device,
        dtype: torch.dtype,
        packing: str,
        instrumentation: Instrumentation,
        adapters: Mapping[str, str | PathLike[str]] | None = None,
        draft_bytes: int = 0,
        draft_host_bytes: int = 0,
    ) -> None:
        own.callback(release_scratch)
        if device.type == "cpu":  # a plan counts what is in use
            keep_large_apart()
        self.device, self.dtype = device, dtype
        self.plan = self._decided(plan, checkpoint)
        self.instrumentation = instrumentation
        self._adapter_paths = adapters or {}
        self._draft_bytes, self._draft_host_bytes = draft_bytes, draft_host_bytes
        transfers = own.enter_context(closing(self._transfers()))
        self._weight_transfers = transfers
        self.runtime = own.enter_context(self._open(checkpoint, transfers, packing))
        memory = self.memory
        self._reader = own.enter_context(closing(self._new_reader()))
        parked = plan.activations != "device"
        blocks, sizes = {}, {}  # bytes by tier: of blocks, and with hidden states behind them
        for tier, purposes in memory.purposes.items():
            blocks[tier] = purposes["KV blocks"] + purposes.get("KV on the move", 0)
            sizes[tier] = blocks[tier] + parked * purposes["hidden states"]
        stream = CopyStream(device) if device.type == "cuda" else None
        tiers = own.enter_context(closing(TierArenas(sizes, stream, instrumentation.pages)))
        self.arenas: Mapping[str, Arena] = tiers.arenas
        self._copies = own.enter_context(closing(self._new_copies()))
        self._spill = None
        if sizes[DISK]:
            folder = plan.spill_folder or Path(tempfile.gettempdir())
            self._spill = own.enter_context(closing(self._new_spill(folder, sizes[DISK])))
        self.stores = self._open_blocks()
        self.activations = None
        if parked:
            # Their moves wait for the disk, those of KV blocks do not.
            moves = own.enter_context(closing(self._new_copies()))
            self.activations = ActivationStore(
                plan.activations,
                plan.tokens_of_passes,
                self._hidden_width,
                dict(self.arenas),
                moves,
                self._spill,
                blocks[DISK],
                dtype,
            )
        decoder = self.runtime.decoder
        self.workspace = None
        if isinstance(decoder, Decoder):
            self.workspace = decoder.new_workspace(plan.round_tokens)

    def _decided(self, plan: Plan, checkpoint: Checkpoint) -> Plan:
        """The plan, with what it leaves to the rates of the machine."""
        return plan

    def _new_reader(self) -> DiskReader:
        return DiskReader(preadv=self.instrumentation.preadv, clock=self.instrumentation.clock)

    def _new_copies(self) -> Copies:
        return Copies(self.device, self.instrumentation)

    def _new_spill(self, folder: Path, nbytes: int) -> SpillFile:
        return SpillFile(folder, nbytes, self._reader, instrumentation=self.instrumentation)

    def _open(self, checkpoint: Checkpoint, transfers: Transfers, packing: str) -> Runtime:
        """The model on what the plan leaves for weights; says what the rest is for."""
        plan = self.plan
        self.limits = self.spec = spec = DecoderSpec.from_config(checkpoint.config)
        self.shapes, self.state_shapes = head_shapes(spec), spec.state_shapes
        self.forms = plan.kv.packed_forms(self.shapes)
        self._hidden_width = spec.hidden_width
        if self._adapter_paths:
            self.adapters = Adapters(self._adapter_paths, spec)
        self.memory = memory = self._plan_memory(checkpoint, transfers.host_staging, packing)
        runtime = self._runtime(
            checkpoint,
            device_memory=memory.left(DEVICE, plan.device_memory),
            host_memory=memory.left(HOST, plan.host_memory),
            kv=plan.kv,
            **self._options(transfers),
        )
        if self.adapters is not None:
            self.adapters.load(self._near, self.device, self._moves_adapters)
        return runtime

    def _runtime(self, checkpoint: Checkpoint, **options: Any) -> Runtime:
        return Runtime(checkpoint, **options)

    def _options(self, transfers: Transfers) -> dict[str, Any]:
        """What a `Runtime` is told beside its memory and cache."""
        return {
            "slots": self.plan.slots,
            "activation_bits": self.plan.activation_bits,
            "cpu_experts": self.plan.cpu_experts,
            "passing_from": self.plan.passing_from,
            "transfers": transfers,
            "device": self.device,
            "dtype": self.dtype,
            "instrumentation": self.instrumentation,
        }

    @abstractmethod
    def new_cache(self) -> SlotCache:
        """An empty KV cache of one batch, whose blocks are `blocks`."""

    def _new_cache(self, kind: Callable[..., AnyCache], **more: Any) -> AnyCache:
        """As `new_cache`, of a kind that takes `more`."""
        kv, plans = self.plan.kv, self.memory.on_gpu or self.memory.blocks
        options = {
            "window": kv.window,
            "attention_top": kv.attention_top,
            "values_rotated": kv.values_rotated,
            "stores": dict(zip((group for group, _ in plans.groups), self.stores, strict=True)),
        }
        return kind(self.shapes, self.forms, self.plan.batch_size, **(options | more))

    @property
    @abstractmethod
    def kv_wait_s(self) -> float:
        """Seconds waited for KV blocks since the start."""

    @property
    def _layer_numbers(self) -> Sequence[int]:
        """The model's numbers of the layers whose keys the cache keeps."""
        spec = self.spec
        if spec.index is None:
            return spec.attention_layers
        return [layer for layer, places in enumerate(spec.cache_places) for _ in places]

    def adapter_bytes(self, plan: Plan) -> int:
        """What adapters take on the device with a plan, at most: layers may stream in tiles."""
        return 0 if self.adapters is None else self._adapter_bytes(plan, True, self._near)[0]

    def _adapter_bytes(self, plan: Plan, tiled: bool, near: Collection[Place]) -> tuple[int, int]:
        """The same with factors added to `near` there; and what the others take on the host."""
        assert self.adapters is not None
        on_gpu = self._moves_adapters
        tokens = plan.pass_tokens if on_gpu else plan.round_tokens, plan.decode_tokens
        on_device, on_host = self.adapters.layers.nbytes(near, self._moves_adapters)
        return on_device + self.adapters.work_bytes(*tokens, tiled, on_gpu), on_host

    @property
    def kv_used(self) -> float:
        """Part of the packed KV blocks that is in use, 0 to 1."""
        pools = self._pools(self.stores)
        return sum(pool.used for pool in pools) / max(1, sum(pool.capacity for pool in pools))

    @property
    def kv_blocks(self) -> dict[str, int]:
        """Packed KV blocks of sequences there is room for, by tier: those of `blocks`' layers."""
        found = dict.fromkeys((DEVICE, HOST, DISK), 0)
        for pool in self._pools(self.stores[:1]):
            found[pool.tier] += pool.capacity
        return found

    def _pools(self, stores: Iterable[TieredBlocks | DeviceBlocks]) -> list[BlockPool]:
        pools = list[BlockPool]()
        for blocks in stores:
            if isinstance(blocks, DeviceBlocks):
                pools.append(blocks.pool)
            tiered = blocks.offloaded if isinstance(blocks, DeviceBlocks) else blocks
            if tiered is not None:
                pools += tiered.pools.values()
        return pools

    def counters(self) -> tuple[float, ...]:
        """Seconds and bytes since the start, in the order of `RoundStats`."""
        weights, activations = self.runtime.store.stats, self.activations
        copied = self._copies.bytes + (0 if activations is None else activations.copies.bytes)
        return (
            weights.wait_s,
            self.kv_wait_s,
            0.0 if activations is None else activations.wait_s,
            weights.bytes_read + self._reader.delivered[0],
            weights.bytes_copied + copied,
            0 if self._spill is None else self._spill.written,
        )

    def links(self) -> dict[str, Moved]:
        """What each link has moved since the start, and how long that took.

        Copies to a GPU's memory run on a stream, and take no seconds here.
        """
        store, parked = self.runtime.store, self.activations
        kv_bytes, kv_s = self._reader.delivered
        weights, copies = store.stats, [self._copies, *([] if parked is None else [parked.copies])]
        nbytes = weights.bytes_copied + sum(one.bytes for one in copies)
        timed = self.device.type != "cuda"
        seconds = self._weight_transfers.copying_s + sum(one.busy_s for one in copies)
        return {
            "disk read": Moved(weights.bytes_read + kv_bytes, weights.disk_busy_s + kv_s),
            "to device": Moved(nbytes, seconds if timed else 0.0),
        }

    @abstractmethod
    def _transfers(self) -> Transfers:
        """What moves weights."""

    @abstractmethod
    def memory_of(self, plan: Plan, tiled: bool = False) -> Memory:
        """What a plan takes beside the weights; tiled: whose layers stream in tiles."""

    @property
    def blocks(self) -> TieredBlocks | DeviceBlocks:
        """Those of the first group of layers, which keep all, if any do."""
        return self.stores[0]

    @abstractmethod
    def _open_blocks(self) -> Sequence[TieredBlocks] | Sequence[DeviceBlocks]:
        """Packed blocks, in the arenas and the first bytes of the spill file."""

    def _plan_memory(self, checkpoint: Checkpoint, staging: int, packing: str) -> Memory:
        """What the plan takes beside the weights; more where layers have to stream in tiles."""
        places = frozenset[Place]() if self.adapters is None else self.adapters.layers.places
        layouts = Layouts(checkpoint, packing)
        host_memory = self.plan.host_memory
        if not self._moves_adapters and host_memory is None:
            host_memory = 0  # what is promised is the device's memory, and host is the same memory
        self._near, memory, residency = settled(
            places,
            checkpoint,
            host_memory,
            lambda near: self._memory_with(near, layouts, staging),
        )
        on_host = memory.total(HOST)
        if self.device.type == "cpu":
            on_host += memory.total(DEVICE) + residency.device_weight_bytes
        self._check_free(on_host - self._draft_bytes)  # the draft model is there
        return memory

    def _check_free(self, nbytes: int) -> None:
        """Raise BudgetError where so much for a plan and the weights is not free."""
        self.instrumentation.check_memory(
            nbytes,
            "the plan's sequences and the weights beside them",
            "batch_size, batches, context, prefill_tokens or device_memory",
        )

    def _memory_with(
        self, near: frozenset[Place], layouts: Layouts, staging: int
    ) -> tuple[Memory, Residency]:
        """The same with factors of adapters to these matrices on the device; and the weights."""
        plan, budget = self.plan, self.plan.device_memory
        memory = tiled = self._beside(self.memory_of(plan), False, near)
        if budget is not None:
            tiled = self._beside(self.memory_of(plan, tiled=True), True, near)
        try:
            residency = plan_residency(
                layouts.checkpoint,
                budget,
                plan.slots,
                workspace=memory.total(DEVICE),
                tiled_workspace=tiled.total(DEVICE),
                packing=layouts.packing,
                host_staging=staging,
                layouts=layouts,
                cpu_experts=plan.cpu_experts,
                passing_from=plan.passing_from,
            )
        except BudgetError as error:
            memory.left(DEVICE, budget, error.least)  # raises what it is that takes so much
            raise
        return (tiled if residency.in_parts else memory), residency

    def _beside(self, memory: Memory, tiled: bool, near: Collection[Place]) -> Memory:
        """With what is in memory beside the model."""
        more = dict[str, int]()
        if self.adapters is not None:
            more["adapters"], on_host = self._adapter_bytes(self.plan, tiled, near)
            memory = memory.beside({"adapters": on_host}, HOST) if on_host else memory
        if self._draft_bytes:
            more["draft model"] = self._draft_bytes
        if self._draft_host_bytes:
            memory = memory.beside({"draft model": self._draft_host_bytes}, HOST)
        return memory.beside(more)


class CpuExecutor(Executor):
    """A CPU, whose memory is the device and the host."""

    stores: Sequence[TieredBlocks]

    @property
    def kv_wait_s(self) -> float:
        return self._staging.ring.wait_s

    def new_cache(self) -> PackedCache:
        plan, lent = self.plan, self.spec.lent_layers
        states, linear = new_states(self.spec, plan.batch_size, drafted=plan.draft_tokens)
        if states is None:
            return self._new_cache(PackedCache, lent=lent)
        return self._new_cache(StatefulCache, lent=lent, states=states, linear=linear)

    def _new_cache(self, kind: Callable[..., AnyCache], **more: Any) -> AnyCache:
        options = {"sinks": self.plan.kv.sinks, "workspace": self._recent_workspace}
        return super()._new_cache(kind, **(options | more))

    def _transfers(self) -> Transfers:
        return ThreadTransfers(self._new_reader())

    def memory_of(self, plan: Plan, tiled: bool = False) -> Memory:
        return Memory.of(plan, self.spec, self.shapes, tiled)

    def _open_blocks(self) -> Sequence[TieredBlocks]:
        self._recent_workspace = RecentWorkspace()
        arenas, hooks = dict(self.arenas), self.instrumentation
        plans = self.memory.blocks
        self._staging = Staging(plans.plans, arenas, self._copies, hooks)
        stores, spill_at = list[TieredBlocks](), 0
        for group, plan in plans.groups:
            store = TieredBlocks(
                [self.forms[layer] for layer in group.layers],
                [self.shapes[layer].kv_heads for layer in group.layers],
                plan,
                self.plan.kv_placement,
                arenas,
                self._copies,
                self._spill,
                layers=[self._layer_numbers[layer] for layer in group.layers],
                staging=self._staging,
                spill_at=spill_at,
                instrumentation=hooks,
            )
            stores.append(store)
            spill_at += plan.pool_bytes(DISK)
        return stores
