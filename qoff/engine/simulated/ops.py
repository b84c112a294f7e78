"""Ops that compute nothing and take the time that a profile says."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from qoff.kernels.layout.delta import DeltaShape, DeltaWeights
from qoff.kernels.layout.device_cache import DeviceLayerCache
from qoff.kernels.layout.ending import PLAIN, Ending, Norm
from qoff.kernels.layout.heads import HeadShape, first_seen
from qoff.kernels.layout.index import IndexShape
from qoff.kernels.layout.kv_format import BLOCK_TOKENS, KVFormat
from qoff.kernels.layout.latent import LatentShape
from qoff.kernels.layout.layer_cache import LayerCache, PackedTokens, kept_blocks
from qoff.kernels.layout.low_rank import LowRanks
from qoff.kernels.layout.mamba import MambaShape, MambaWeights
from qoff.kernels.layout.qexperts import ExpertsMlp, QExperts
from qoff.kernels.layout.qtensor import QTensor
from qoff.kernels.layout.ragged import Ragged
from qoff.kernels.layout.routing import Routing
from qoff.kernels.layout.short_conv import ShortConvShape
from qoff.kernels.layout.states import LayerStates, StateShape
from qoff.kernels.layout.streams import StreamRouter
from qoff.plan.processor import Processor

from .machine import VirtualMachine

BlockSeconds: TypeAlias = Callable[[KVFormat, int, float], float]


class SimulatedOps:
    """As `kernels.ops.Ops`. Results are memory that nobody writes to, except what decides.

    matrices: of a layer, without those of experts that are chosen.
    Experts are chosen at random, each alike likely, always the same in a process.
    """

    RECORDER, USES_OUT = None, True  # on a GPU, too: what tiles leave there would be copied
    ACTIVATION_BITS: tuple[int, ...] = (8, 16)

    def __init__(self, machine: VirtualMachine, matrices: int) -> None:
        self.machine, self._device = machine, machine.profile.device
        on_gpu = machine.profile.on_gpu
        self.PACKING, self.CACHE = ("split32", "device") if on_gpu else ("rows16", "host")
        self.call_s = 0.0  # of an op beside its work
        self.pass_s = 0.0  # of a pass beside its ops
        self._last = deque[tuple[int, int]](maxlen=matrices)  # used last: address and bytes
        self._random = torch.Generator().manual_seed(0)
        self._block_s = _remembering(self._device)
        self._host_block_s = _remembering(machine.profile.host)
        self._matmul_s: dict[tuple[float, int, bool, int], float] = {}  # for each weight

    def begin_pass(self) -> None:
        """What Python does for a pass beside calling ops."""
        self.machine.compute(self.pass_s, on_host=True)

    def w4_linear(
        self,
        x: Tensor,
        weight: QTensor,
        *,
        end: Ending = PLAIN,
        activation_bits: int = 16,
        out: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        rows, columns = weight.shape
        near = self._is_near(weight)
        self._matmul(len(x), rows * columns, weight.bits, near, activation_bits)
        if out is not None:
            return out
        return x.new_empty(len(x), rows // 2 if end.gated else rows)

    def norm(self, x: Tensor, *_: Any, out: Tensor | None = None, **__: Any) -> Tensor:
        self.machine.compute(self.call_s)
        return torch.empty_like(x) if out is None else out

    gate = matched = norm

    def resize_heads(
        self, x: Tensor, dim: int, to: int, *, first: int = 0, out: Tensor | None = None
    ) -> Tensor:
        self.machine.compute(self.call_s)
        columns = first + (x.shape[1] - first) // dim * to
        return x.new_empty(len(x), columns) if out is None else out

    def low_rank(self, x: Tensor, ranks: LowRanks, which: Tensor, rows: slice, **_: Any) -> Tensor:
        self.machine.compute(self.call_s)
        return x.new_empty(len(x), rows.stop - rows.start)

    def route(
        self, scores: Tensor, routing: Routing, *vectors: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        self.machine.compute(self.call_s)
        rows, count = scores.shape
        first = torch.randint(count, (rows, 1), generator=self._random)
        ids = (first + torch.arange(routing.top_k)) % count  # neighbours, as likely as any others
        return ids, torch.full(ids.shape, 1 / routing.top_k)

    def experts(
        self,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        mlp: ExpertsMlp,
        *,
        activation_bits: int = 16,
        out: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        numbers = topk_ids[topk_ids >= 0]
        used = max(1, len(numbers.unique()))
        matrices = (mlp.gate_up, mlp.down)
        self.compute_experts(len(numbers) / used, used, matrices, activation_bits)
        return torch.empty_like(x) if out is None else out

    def compute_experts(
        self,
        rows: float,
        count: int,
        matrices: Iterable[QExperts],
        activation_bits: int,
        on_host: bool = False,
    ) -> None:
        """So many experts compute for so many rows each. on_host: by the CPU beside a GPU."""
        processor = self.machine.profile.host if on_host else self._device
        for one in matrices:
            each = processor.experts_s(one.bits, np.asarray(rows), activation_bits)
            weights = count * one.shape[0] * one.shape[1]
            seconds = float(each) * weights + (0.0 if on_host else self.call_s)
            nbytes = count * (one.codes[0].nbytes + one.scale_min[0].nbytes) if on_host else 0
            self.machine.compute(seconds, on_host, nbytes)

    def repack_experts(self, packed: QExperts, into: QExperts) -> None:
        """As `kernels.repack.repack_experts`: reads and writes memory."""
        each = [x[0].nbytes for one in (packed, into) for x in (one.codes, one.scale_min)]
        self.machine.compute(packed.count * sum(each) / self._device.bytes_per_s)

    def add_experts(self, weighted: Tensor, *, out: Tensor | None = None, **_: Any) -> Tensor:
        self.machine.compute(self.call_s)
        if out is not None:
            return out
        return weighted.new_empty(weighted.shape[0], weighted.shape[-1])

    def absorb(
        self,
        q: Tensor,
        kv: Tensor,
        weight: QTensor,
        norm: Norm,
        shape: LatentShape,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        weights = shape.heads * shape.nope_dim * shape.latent
        self._matmul(len(q), weights, weight.bits, self._is_near(weight))
        width = (shape.heads + 1) * shape.head_dim
        return q.new_empty(len(q), width) if out is None else out

    def expand(
        self, x: Tensor, weight: QTensor, shape: LatentShape, *, out: Tensor | None = None
    ) -> Tensor:
        weights = shape.heads * shape.value_dim * shape.latent
        self._matmul(len(x), weights, weight.bits, self._is_near(weight))
        return x.new_empty(len(x), shape.heads * shape.value_dim) if out is None else out

    def choose(
        self,
        qk: Tensor,
        weights: Tensor,
        shape: IndexShape,
        cache: Any,
        ragged: Ragged,
        *,
        out: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        self._attend_to(shape.keys, cache, ragged)
        return qk.new_empty(len(qk), shape.top, dtype=torch.int32) if out is None else out

    def delta(
        self,
        qkv: Tensor,
        z: Tensor,
        b: Tensor,
        a: Tensor,
        weights: DeltaWeights,
        shape: DeltaShape,
        states: LayerStates,
        ragged: Ragged,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        return self._recurrent(qkv, shape, ragged, out)

    def short_conv(
        self,
        bcx: Tensor,
        weight: Tensor,
        shape: ShortConvShape,
        states: LayerStates,
        ragged: Ragged,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        return self._recurrent(bcx, shape, ragged, out)

    def mamba(
        self,
        zxbcdt: Tensor,
        weights: MambaWeights,
        shape: MambaShape,
        states: LayerStates,
        ragged: Ragged,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        return self._recurrent(zxbcdt, shape, ragged, out)

    def _recurrent(
        self, given: Tensor, shape: StateShape, ragged: Ragged, out: Tensor | None
    ) -> Tensor:
        """The op of a recurrent layer."""
        rows, sequences = np.asarray(len(given)), np.asarray(len(ragged.spans))
        seconds = float(self._device.states_s(shape, rows, sequences))
        self.machine.compute(self.call_s + seconds)
        return given.new_empty(len(given), shape.values) if out is None else out

    def predict(self, hidden: Tensor, router: StreamRouter, mixing: Tensor, out: Tensor) -> Tensor:
        self.machine.compute(self.call_s)
        return out

    def correct(self, hidden: Tensor, found: Tensor, *_: StreamRouter | Tensor) -> Tensor:
        self.machine.compute(self.call_s)
        return found

    def sparse_gate(
        self, z: Tensor, deviations: float, activation: str, *, out: Tensor | None = None
    ) -> Tensor:
        self.machine.compute(self.call_s)
        return z.new_empty(len(z), z.shape[1] // 2) if out is None else out

    def attention(
        self,
        qkv: Tensor,
        shape: HeadShape,
        cache: Any,
        ragged: Ragged,
        *,
        chosen: Tensor | None = None,
        out: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        share = 1.0 if chosen is None else _chosen_share(chosen.shape[1], ragged)
        self._attend_to(shape, cache, ragged, share)
        return qkv.new_empty(len(qkv), shape.out_width) if out is None else out

    def _matmul(
        self, rows: float, weights: int, bits: int, near: bool = False, activation_bits: int = 16
    ) -> None:
        how = rows, bits, near, activation_bits
        if how not in self._matmul_s:
            each = self._device.near_s if near else self._device.matmul_s
            self._matmul_s[how] = float(each(bits, np.asarray(rows), activation_bits))
        self.machine.compute(self._matmul_s[how] * weights + self.call_s)

    def _is_near(self, weight: QTensor) -> bool:
        """Whether the pass before had this matrix, and a layer's fit in the last cache."""
        used = weight.codes.data_ptr(), weight.codes.nbytes + weight.scale_min.nbytes
        found = used in self._last
        if not found:
            self._last.append(used)
        return found and sum(nbytes for _, nbytes in self._last) <= self._device.cache_bytes

    def _attend_to(self, shape: HeadShape, cache: Any, ragged: Ragged, share: float = 1.0) -> None:
        """share: of what a pass could attend to."""
        attend = self._attend_on_gpu if isinstance(cache, DeviceLayerCache) else self._attend
        attend(shape, cache, ragged, share)

    def _attend(self, shape: HeadShape, cache: LayerCache, ragged: Ragged, share: float) -> None:
        packed = {span.slot: 0 for span in ragged.spans}
        seconds = 0.0
        for part in cache.packed:
            seconds += _packed_s(self._block_s, shape, part, ragged, cache.top)
            if part.bounds is not None:
                part.bounds.bring(*_spread(part, shape.kv_heads, cache.top))
            for slot in packed:
                packed[slot] += part.table.counts[slot]
        past = [span.past - packed[span.slot] for span in ragged.spans]
        seconds += _unpacked_s(self._device, shape, ragged, past, cache.keys.itemsize)
        self.machine.compute(self.call_s + share * seconds)

    def _attend_on_gpu(
        self, shape: HeadShape, cache: DeviceLayerCache, ragged: Ragged, share: float
    ) -> None:
        """Blocks elsewhere by the CPU, and then those here."""
        step, group = cache.step, shape.heads // shape.kv_heads
        top = cache.top if step.max_rows <= 1 else 1.0
        seconds, nbytes = 0.0, 0
        for part in cache.offloaded:
            seconds += _packed_s(self._host_block_s, shape, part, ragged, top)
            nbytes += _blocks(shape, part, ragged, top) * part.form.nbytes
            if part.bring is not None:
                part.bring(*_spread(part, shape.kv_heads, top))
        if cache.offloaded:
            self.machine.compute(seconds, on_host=True, nbytes=nbytes)
        there = step.packed if step.resident_from is None else step.packed - step.resident_from
        packed, before = there.tolist(), step.packed.tolist()
        seconds = 0.0
        for span in ragged.spans:
            tokens, all_tokens = packed[span.slot], before[span.slot]
            if all_tokens and top < 1:
                ranked = all_tokens // BLOCK_TOKENS - _unseen(shape, span.past, 0, all_tokens)
                bounds = ranked * shape.kv_heads * cache.form.bound_bytes
                seconds += bounds / self._device.bytes_per_s
            tokens -= BLOCK_TOKENS * _unseen(shape, span.past, all_tokens - tokens, tokens)
            if tokens and top < 1:
                tokens = BLOCK_TOKENS * kept_blocks(top, tokens // BLOCK_TOKENS)
            if tokens:
                each = self._block_s(cache.form, group * span.count, tokens)
                seconds += tokens // BLOCK_TOKENS * shape.kv_heads * each
        past = [span.past - before[span.slot] for span in ragged.spans]
        seconds += _unpacked_s(self._device, shape, ragged, past, cache.recent_k.itemsize)
        self.machine.compute((1 + 2 * (top < 1)) * self.call_s + share * seconds)


def _chosen_share(top: int, ragged: Ragged) -> float:
    """The part of their tokens that new ones attend to, up to `top` each."""
    lengths = [span.past + span.count for span in ragged.spans]
    return sum(min(top, tokens) for tokens in lengths) / sum(lengths)


def _blocks(shape: HeadShape, part: PackedTokens, ragged: Ragged, top: float = 1.0) -> int:
    """Blocks of KV heads that a pass attends to in a part of the cache."""
    blocks = 0
    for span in ragged.spans:
        tokens = part.table.counts[span.slot]
        first = part.table.first[span.slot] if part.table.first else 0
        count = tokens // BLOCK_TOKENS - _unseen(shape, span.past, first, tokens)
        blocks += kept_blocks(top, count) if count and span.count == 1 else count
    return blocks * shape.kv_heads


def _unseen(shape: HeadShape, position: int, first: int, tokens: int) -> int:
    """Blocks that a query does not see, of those of so many tokens from position `first` on."""
    behind = max(0, first_seen(position, shape.reach) - first) if shape.reach else 0
    return min(behind, tokens) // BLOCK_TOKENS


def _spread(part: PackedTokens, kv_heads: int, top: float) -> tuple[Tensor, Tensor]:
    """Blocks that single tokens attend to: for every head the same, in the same distances."""
    slots = [span.slot for span in part.table.ragged.spans]
    there = torch.tensor([part.table.counts[slot] // BLOCK_TOKENS for slot in slots])
    counts = torch.tensor([kept_blocks(top, n) if n else 0 for n in there.tolist()])
    places = torch.arange(int(counts.max())) * there[:, None] // counts.clamp(min=1)[:, None]
    heads = (len(slots), kv_heads)
    return (
        places[:, None].expand(*heads, -1).int().contiguous(),
        counts[:, None].expand(heads).int().contiguous(),
    )


def _remembering(processor: Processor) -> BlockSeconds:
    """Seconds for a block of a KV head by its form, queries of it and tokens of a sequence.

    Layers of a pass are alike.
    """

    @cache
    def block_s(form: KVFormat, queries: int, tokens: float) -> float:
        return float(processor.attention_s(form, np.asarray(queries), np.asarray(tokens)))

    return block_s


def _packed_s(
    block_s: BlockSeconds, shape: HeadShape, part: PackedTokens, ragged: Ragged, top: float
) -> float:
    """Seconds to attend to it, by the queries that each KV head has of a sequence."""
    queries = shape.heads // shape.kv_heads * max(span.count for span in ragged.spans)
    blocks = _blocks(shape, part, ragged, top)
    if not blocks:
        return 0.0
    tokens = BLOCK_TOKENS * blocks / shape.kv_heads / len(ragged.spans)  # of a sequence
    return blocks * block_s(part.form, queries, tokens)


def _unpacked_s(
    processor: Processor, shape: HeadShape, ragged: Ragged, past: list[int], itemsize: int
) -> float:
    """Seconds to attend to tokens that are not packed; past: those of each before the pass."""
    if ragged.is_decode:
        tokens = sum(past) + len(past)
        nbytes = shape.kv_heads * shape.cached_width * itemsize * tokens
        group = np.asarray(shape.heads / shape.kv_heads)
        return nbytes * float(processor.unpacked_s(group, np.asarray(tokens / len(past))))
    counts = np.array([span.count for span in ragged.spans])
    keys = np.array(past) + (counts + 1) / 2
    each = processor.prompt_s(counts.astype(float)) * shape.heads * shape.cached_width / 2
    return float((each * counts * keys).sum())
