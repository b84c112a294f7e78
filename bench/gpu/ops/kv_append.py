"""Appending to the packed KV cache on a GPU: checks and cases of `bench.gpu`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from bench.gpu.case import Call, Check, PreparedCase, TimedCase, relative_rms
from bench.gpu.model_shapes import ModelShape
from bench.gpu.operands import step_of
from bench.gpu.targets import PLAIN_APPEND
from qoff.kernels.layout.device_cache import DeviceLayerCache
from qoff.kernels.layout.kv_format import BLOCK_TOKENS, KVFormat
from qoff.kernels.reference import kv_blocks
from qoff.kernels.triton.attention.append import kv_append

OP = "kv_append"
_BOUND = 2e-2  # a code beside a half may be the neighbour of the reference's: a whole step


@dataclass(frozen=True)
class Append:
    """New tokens for every sequence of a cache, and where they go."""

    k: Tensor
    v: Tensor
    cache: DeviceLayerCache

    def run(self, function: Callable[..., None] = kv_append) -> None:
        function(self.k, self.v, self.cache)


def append(
    form: KVFormat, kv_heads: int, starts: list[int], rows: int, device: torch.device
) -> Append:
    """`rows` random tokens for sequences that have `starts` tokens already."""
    ends = [start + rows for start in starts]
    sequences, tokens = len(starts), rows * len(starts)
    before = [start // BLOCK_TOKENS * BLOCK_TOKENS for start in starts]
    after = [end // BLOCK_TOKENS * BLOCK_TOKENS for end in ends]
    blocks = max([end // BLOCK_TOKENS for end in ends] + [1])
    table = torch.arange(sequences * blocks, dtype=torch.int32, device=device)
    recent = torch.randn(2, sequences, BLOCK_TOKENS, kv_heads, form.head_dim, device=device).half()

    pool = torch.zeros(sequences * blocks, kv_heads, form.nbytes, dtype=torch.uint8, device=device)
    step = step_of(starts, [rows] * sequences, before, after, table.view(sequences, blocks))
    return Append(
        torch.randn(tokens, kv_heads, form.head_dim, device=device).half(),
        torch.randn(tokens, kv_heads, form.head_dim, device=device).half(),
        DeviceLayerCache(form, pool, recent[0], recent[1], step),
    )


def checks(device: torch.device, tiny: bool) -> Iterator[Check]:
    """The error of what is read back from the blocks, and of the ring."""
    forms = [KVFormat(64), KVFormat(64, 8, 8)]
    if not tiny:
        forms += [KVFormat(128), KVFormat(80), KVFormat(128, k_bits=8), KVFormat(256)]
    for form in forms:
        for rows in (1, 70) if tiny else (1, 64, 200):
            kind = f"{form.k_bits} bit, {form.head_dim} channels"
            error = partial(_error, form, rows, device)
            yield Check(OP, f"{kind}, {rows} rows", error, _BOUND)


def _error(form: KVFormat, rows: int, device: torch.device) -> float:
    work = append(form, 2, [0, 63, 100], rows, device)
    mine = work.cache
    copies = {name: getattr(mine, name).clone() for name in ("pool", "recent_k", "recent_v")}
    other = replace(mine, **copies)
    work.run()
    replace(work, cache=other).run(kv_blocks.append)
    found = kv_blocks.dequantize_blocks(mine.pool, form)
    wanted = kv_blocks.dequantize_blocks(other.pool, form)
    pairs = [(mine.recent_k, other.recent_k), (mine.recent_v, other.recent_v)]
    if mine.step.max_new_blocks:
        pairs += zip(found, wanted, strict=True)
    return max(relative_rms(a, b) for a, b in pairs)


def cases(quick: bool, models: Sequence[ModelShape]) -> Iterator[TimedCase]:
    for rows, sequences in ((1, 32), (2048, 1)):
        for model in models:
            values = rows * sequences * model.kv_heads * model.head_dim
            # K and V are read once; packed they are written as a quarter and some, or as they are.
            written = 2 * values * 2 if rows == 1 else values * 9 // 8
            name = f"{sequences} x {rows} tokens, {model.kv_heads} KV heads"
            nbytes = 2 * values * 2 + written
            build = partial(_build, model, rows, sequences)
            yield TimedCase(OP, model.name, name, nbytes, build, m=rows, footprint=8 * nbytes)


def _build(model: ModelShape, rows: int, sequences: int, device: torch.device) -> PreparedCase:
    start = 0 if rows > 1 else 5  # no block becomes complete at most tokens of decode
    work = append(KVFormat(model.head_dim), model.kv_heads, [start] * sequences, rows, device)
    return PreparedCase(work.run, {PLAIN_APPEND: partial(_plain, work)})


def _plain(work: Append) -> Call:
    """Two indexed copies into an fp16 cache."""
    cache = torch.zeros(2, *work.k.shape, dtype=torch.float16, device=work.k.device)
    slots = torch.arange(work.k.shape[0], device=work.k.device)

    def call() -> None:
        cache[0].index_copy_(0, slots, work.k)
        cache[1].index_copy_(0, slots, work.v)

    return call
