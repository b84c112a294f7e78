"""A checkpoint that runs: weights where the plan put them, moved as the decoder asks for them."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from os import PathLike
from typing import Any, Self, TypeAlias

import torch
from torch import Tensor

from qoff.budgets import CPU, device_guard, give_back, resolve_device, resolve_dtype
from qoff.checkpoint import Checkpoint
from qoff.errors import ArgumentError, BudgetError, UnsupportedModelError
from qoff.interrupts import check as check_interrupts
from qoff.kernels.layout.distribution import Choice
from qoff.kernels.ops import Ops, Scratch, new_scratch, ops_for, with_scratch
from qoff.kvcache import KVCache, KVQuant
from qoff.memory import ThreadTransfers, Transfers, WeightStore, plan_residency
from qoff.memory.experts import ExpertStats
from qoff.memory.instrumentation import PLAIN, Instrumentation
from qoff.memory.plan import EMBEDDING, HEAD, PER_LAYER, Residency, unit_label
from qoff.memory.turn import Turn
from qoff.process import ForkLock, only_here
from qoff.system_memory import keep_large_apart, refusals

from .forward_pass import ForwardPass
from .modules.decoder import ModuleDecoder, is_modules
from .native.caches import check_kv
from .native.decoder import Decoder
from .native.following import Noise
from .native.graphs import Replays
from .native.mixing import mixed_pass
from .native.sweeping import sweep_passes
from .spec import DecoderSpec
from .stored import check_checkpoint

AnyDecoder: TypeAlias = Decoder | ModuleDecoder
_NONE_ON_CPU = (
    "cpu_experts: no expert stays in host memory, as all have room on the device, or host_memory "
    "has none for one; leave it out, or use a smaller device_memory or a larger host_memory"
)


@dataclass(frozen=True)
class RuntimeStats:
    """What has happened since the model was loaded. Bytes and seconds."""

    disk_bytes: int  # read from disk, loading included
    disk_busy_s: float  # time with at least one read under way
    wait_s: float  # time the decoder waited for weights
    arena_peak: int
    arena_capacity: int
    resident_bytes: int
    slot_bytes: int  # all slots together
    experts: ExpertStats  # of a mixture, that came one by one


class Runtime:
    """Runs the forward passes of one checkpoint within a memory budget.

    device_memory bounds, in bytes, the arena of resident weights and slots (None: everything
    resident); what does not fit streams from disk through `slots` slots, layer after layer.
    host_memory: bytes for sources of what streams, beside the disk, or what says how many for a
    decoder. transfers: what moves weights, closed with this. activation_bits: of the inputs of each
    layer's matmuls, 16 or, on a CPU, 8. kv: how its caches are packed; None keeps them in float32,
    which a GPU does not. The KV cache is the caller's and outside of that budget. device: "cpu", or
    a GPU like "cuda"; there hidden states and recent K and V are of `dtype`, float16 or bfloat16
    ("auto": what the model was trained in), and the checkpoint is of packing split32; there
    decoding is replayed as CUDA graphs, unless `settings.cuda_graphs` says no, and matrices are
    dequantized in `scratch`, by default one that fits device_memory and keeps nothing. verify:
    compare each file with its checksum. trust_remote_code: run code that came with a model
    transformers does not have. reserves: bytes within device_memory to keep free for the caller,
    without and with layers in tiles; the first that leave enough for the weights are taken.
    cpu_experts: on a GPU, the CPU computes the experts that host_memory holds; passing_from: but
    for passes of so many tokens or more, which bring them to the GPU (None: for all passes). One
    forward pass runs at a time; others wait their turn. Raises BudgetError when the budget is too
    small, OpError for a device that is not there, and the errors of `Checkpoint.open`. In a forked
    process it runs on a CPU, if nothing streams; else passes raise ArgumentError.
    """

    def __init__(
        self,
        path: str | PathLike[str] | Checkpoint,
        *,
        device_memory: int | None = None,
        slots: int = 2,
        activation_bits: int = 16,
        kv: KVQuant | None = None,
        host_memory: int | Callable[[AnyDecoder], int | None] | None = None,
        transfers: Transfers | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | str = "auto",
        scratch: Scratch | None = None,
        trust_remote_code: bool = False,
        instrumentation: Instrumentation = PLAIN,
        verify: bool = True,
        reserves: Callable[[AnyDecoder], Iterable[tuple[int, int]]] = lambda _: ((0, 0),),
        cpu_experts: bool = False,
        passing_from: int | None = None,
    ) -> None:
        self.checkpoint = path if isinstance(path, Checkpoint) else Checkpoint.open(path)
        where = resolve_device(device)
        if where.type == "cpu" and device_memory is not None:
            keep_large_apart()
        ops = instrumentation.ops_for(where, activation_bits)
        if where.type == "cpu" and ops.CACHE == "device":  # a GPU's ops in tests
            hidden = torch.float16 if isinstance(dtype, str) else dtype
        else:
            hidden = resolve_dtype(dtype, self.checkpoint.config, where)
        self.decoder: AnyDecoder
        self.scratch: Scratch | None = None
        workspace = 0
        if is_modules(self.checkpoint):
            self.decoder = ModuleDecoder(
                self.checkpoint,
                self._scratched(ops, scratch, where, hidden, device_memory),
                self._embed,
                lambda ids: self.store.gather_rows(PER_LAYER, ids),
                trust_remote_code=trust_remote_code,
                kv=kv,
                device=where,
                dtype=hidden,
                device_memory=device_memory,
            )
            workspace = self.decoder.outer_bytes
        else:
            spec = DecoderSpec.from_config(self.checkpoint.config)
            check_checkpoint(spec, self.checkpoint)
            check_kv(spec, kv, ops.CACHE == "device")
            ops = self._scratched(ops, scratch, where, hidden, device_memory)
            replays = None
            if instrumentation.records(where):
                replays = Replays(where, instrumentation.record, scratch=self.scratch)
            elif ops.RECORDER is not None:
                replays = Replays(where, while_done=ops.RECORDER())
            embed = self._embed, where, hidden, replays, self._embed_layers
            self.decoder = Decoder(spec, ops, *embed)
        if cpu_experts:
            _check_cpu_experts(self.decoder, ops.CACHE == "device")
            ops_for(CPU)  # compiles them, if nobody has
        transfers = transfers or transfers_to(where)
        try:
            if callable(host_memory):
                host_memory = host_memory(self.decoder)
            residency = _planned(
                reserves(self.decoder),
                partial(
                    plan_residency,
                    self.checkpoint,
                    device_memory,
                    slots,
                    packing=ops.PACKING,
                    host_memory=host_memory,
                    host_staging=transfers.host_staging,
                    in_place=transfers.in_place(instrumentation),
                    one_by_one=isinstance(self.decoder, Decoder) or self.decoder.one_by_one,
                    cpu_experts=cpu_experts,
                    passing_from=passing_from,
                ),
                workspace,
            )
            if cpu_experts and not residency.cpu_experts:
                raise ArgumentError(_NONE_ON_CPU)
            on_host = residency.host_bytes + (residency.device_bytes if where.type == "cpu" else 0)
            instrumentation.check_memory(on_host, "weights and working space")
        except BaseException:
            transfers.close()
            raise
        self.residency = residency
        self.store = WeightStore(
            self.checkpoint,
            residency,
            transfers=transfers,
            instrumentation=instrumentation,
            verify=verify,
        )
        if isinstance(self.decoder, Decoder):
            self.decoder.resident = self.store.all_resident
            recorded = self.decoder.replays
            if self.store.experts and recorded and recorded.while_done is None:
                self.decoder.replays = None  # graphs know the experts that they compute
        self.kv = kv
        self._device = where
        self._timeline = instrumentation.timeline
        self._turn = ForkLock()
        weakref.finalize(self, only_here(self.store.close))  # for who drops it without closing it

    def forward(self, run: ForwardPass) -> Tensor:
        """Run one forward pass: the logits, float32 [R, vocab_size]; the cache has grown."""
        check_interrupts()
        self.store.check_process()
        with self._turn, refusals(), device_guard(self._device):
            logits = followed(self.decoder, self.store, run) if self._timeline is None else None
            return self._computed(run) if logits is None else logits

    def tokens(
        self, run: ForwardPass, choice: Choice, most: int, noise: Noise | None = None
    ) -> list[list[int]]:
        """Run several decode steps; see `Following.tokens`. None where `forward` has to."""
        check_interrupts()
        if self._timeline is not None:
            return []
        self.store.check_process()
        with self._turn, refusals(), device_guard(self._device):
            return followed_tokens(self.decoder, self.store, run, choice, most, noise)

    def _computed(self, run: ForwardPass) -> Tensor:
        """Compute a pass unit by unit."""
        found = swept(self.decoder, self.store, [run])
        if found is not None:
            return found[0]
        with Turn(self.store) as turn:
            steps = self.decoder.steps(run)
            unit = next(steps)
            while True:
                weights = turn.acquire(unit)
                start = 0.0 if self._timeline is None else time.perf_counter()
                try:
                    following = steps.send(weights)
                except StopIteration as finished:
                    return finished.value
                finally:
                    if self._timeline is not None:
                        stop = time.perf_counter()
                        self._timeline.add("compute", unit_label(unit), start, stop)
                unit = following

    def new_cache(self, sequences: int, capacity: int = 0) -> KVCache:
        """Return an empty KV cache for this model."""
        self.store.check_process()
        return self.decoder.new_cache(sequences, capacity, self.kv)

    @property
    def spec(self) -> DecoderSpec:
        """What the native decoder runs. Raises UnsupportedModelError for another one."""
        if not isinstance(self.decoder, Decoder):
            raise UnsupportedModelError(
                f"{self.checkpoint.path}: runs through transformers' modules, not qoff's own "
                "decoder, which this needs"
            )
        return self.decoder.spec

    def stats(self) -> RuntimeStats:
        """Return the counters as they are now."""
        done, plan = self.store.stats, self.residency
        return RuntimeStats(
            disk_bytes=done.bytes_read,
            disk_busy_s=done.disk_busy_s,
            wait_s=done.wait_s,
            arena_peak=done.arena_peak,
            arena_capacity=plan.device_bytes,
            resident_bytes=plan.resident_bytes,
            slot_bytes=plan.slots * plan.slot_bytes,
            experts=done.experts,
        )

    def close(self) -> None:
        """Stop the transfers and give the memory back, behind a pass under way; idempotent.

        In a forked process it does nothing.
        """
        if not self.store.is_here:
            return
        self.store.close()  # which ends what a pass waits for
        with self._turn:
            if isinstance(self.decoder, Decoder):
                self.decoder.forget_weights()
            if self.scratch is not None:
                self.scratch.release()
        give_back(self._device)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _scratched(self, ops: Ops, scratch: Scratch | None, *of: Any) -> Ops:
        """The ops of a GPU with a scratch; None: one by `of`, of `new_scratch`."""
        if ops.CACHE != "device":
            return ops
        self.scratch = scratch or new_scratch(*of)
        return with_scratch(ops, self.scratch)

    def _embed(self, ids: Tensor, scale: float = 1.0) -> Tensor:
        return self.store.gather_rows(EMBEDDING, ids, scale)

    def _embed_layers(self, ids: Tensor, scale: float) -> Tensor:
        rows = self.store.gather_rows(PER_LAYER, ids, scale, rows_each=self.spec.num_layers)
        return rows.view(len(ids), -1)


def followed(decoder: AnyDecoder, store: WeightStore, run: ForwardPass) -> Tensor | None:
    """As `Decoder.follow`. Raises ArgumentError where the store is closed."""
    if not isinstance(decoder, Decoder) or not decoder.resident or run.cache.ended is None:
        return None
    with store.use(HEAD):
        return decoder.follow(run)


def swept(
    decoder: AnyDecoder, store: WeightStore, runs: Sequence[ForwardPass], together: bool = True
) -> list[Tensor] | None:
    """As `sweep_passes`: the logits of passes that can be one recording."""
    if not isinstance(decoder, Decoder):
        return None
    if store.experts:
        logits = mixed_pass(decoder, store, runs[0]) if len(runs) == 1 else None
        return None if logits is None else [logits]
    return sweep_passes(decoder, runs, store.sweep, together)


def joined(decoder: AnyDecoder, runs: Sequence[ForwardPass]) -> ForwardPass | None:
    """As `Decoder.join`."""
    return decoder.join(runs) if isinstance(decoder, Decoder) else None


def followed_tokens(
    decoder: AnyDecoder, store: WeightStore, run: ForwardPass, *choosing: Any
) -> list[list[int]]:
    """As `Following.tokens`. Raises ArgumentError where the store is closed."""
    if not isinstance(decoder, Decoder) or not decoder.resident or run.cache.ended is None:
        return []
    with store.use(HEAD):
        return decoder.follow_with_tokens(run, *choosing)


def _check_cpu_experts(decoder: AnyDecoder, on_gpu: bool) -> None:
    """Raise ArgumentError for a device or a model that has no experts for a CPU beside it."""
    if not on_gpu:
        raise ArgumentError("cpu_experts is for a GPU: a CPU computes all experts; leave it out")
    if not isinstance(decoder, Decoder) or decoder.spec.experts is None:
        raise ArgumentError("cpu_experts needs a mixture of experts that qoff computes itself")


def _planned(
    reserves: Iterable[tuple[int, int]], plan: Callable[..., Residency], outer: int
) -> Residency:
    """The plan with the first reserve that leaves room for weights; else the last one's error."""
    refusal: BudgetError | None = None
    for whole, tiled in reserves:
        try:
            return plan(workspace=outer + whole, tiled_workspace=outer + tiled)
        except BudgetError as error:
            refusal = error
    assert refusal is not None
    raise refusal


def transfers_to(device: torch.device) -> Transfers:
    """What moves weights to a device."""
    if device.type == "cpu":
        return ThreadTransfers()
    from qoff.memory.io.cuda_transfers import CudaTransfers

    return CudaTransfers(device)
