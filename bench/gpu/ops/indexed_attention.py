"""An index of keys and attention to what it chooses on a GPU: checks and cases of `bench.gpu`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.gpu.case import BOUNDS, Check, PreparedCase, TimedCase, dtypes, relative_rms, short
from bench.gpu.model_shapes import ModelShape
from bench.gpu.operands import random_cache
from bench.gpu.ops import latent_attention
from qoff.kernels.layout.device_cache import DeviceLayerCache
from qoff.kernels.layout.heads import HeadShape
from qoff.kernels.layout.index import IndexShape
from qoff.kernels.layout.kv_format import KVFormat
from qoff.kernels.reference import attention as reference
from qoff.kernels.reference.index import index_scores
from qoff.kernels.triton.indexed.attend import chosen_attention
from qoff.kernels.triton.indexed.choose import choose

OP = "indexed_attention"
_FORM = KVFormat(576, latent=512)
_MODELS = {  # index, heads that attend
    "DeepSeek-V3.2": (IndexShape(64, 128, 64, 2048), 128),
    "GLM-5": (IndexShape(32, 128, 64, 2048), 64),
}
_TINY = IndexShape(16, 64, 32, 40)
_CONTEXTS, _BATCHES, _ROWS = (8192, 32768, 131072), (1, 8), 512
_Index = tuple[Tensor, Tensor, IndexShape, DeviceLayerCache]
_Attention = tuple[Tensor, Tensor, DeviceLayerCache, HeadShape, Tensor]


def checks(device: torch.device, tiny: bool) -> Iterator[Check]:
    index = _TINY if tiny else _MODELS["DeepSeek-V3.2"][0]
    form = KVFormat(96, latent=64) if tiny else _FORM
    pasts = [1, 70, 130] if tiny else [5000, 1, 2100, 300]
    for dtype in dtypes(device)[:1] if tiny else dtypes(device):
        for rows in (1, 9) if tiny else (1, 200):
            error = partial(_choice_error, index, pasts, rows, dtype, device)
            yield Check(OP, f"{short(dtype)} choice, {rows} rows", error, 2 * BOUNDS[dtype])
            for heads in (3,) if tiny else (128, 20):
                operands = form, heads, index.top, pasts, rows, dtype, device
                error = partial(_error, partial(problem, *operands))
                name = f"{short(dtype)} {heads} heads, {rows} rows"
                yield Check(OP, name, error, 2 * BOUNDS[dtype])


def index_problem(
    index: IndexShape, pasts: list[int], rows: int, dtype: torch.dtype, device: torch.device
) -> _Index:
    """What `choose` takes: `rows` new tokens of each sequence."""
    form = KVFormat(index.dim, 8, 8, latent=index.keys.latent)
    new = None if rows == 1 else [rows] * len(pasts)
    cache = random_cache(form, 1, pasts, dtype, device, new)
    count = rows * len(pasts)
    qk = torch.randn(count, index.width, device=device).to(dtype)
    weights = torch.randn(count, index.heads, device=device).to(dtype)
    return qk, weights, index, cache


def problem(
    form: KVFormat, heads: int, top: int, pasts: list[int], rows: int, *on: Any
) -> _Attention:
    """What attention takes, with lists of tokens drawn at random. on: a dtype and a device."""
    q, k, cache, shape = latent_attention.problem(form, heads, pasts, rows, *on)
    chosen = torch.zeros(len(q), top, dtype=torch.int32, device=q.device)
    for listed, position in zip(chosen, cache.step.positions.tolist(), strict=True):
        count = min(top, position + 1)
        drawn = torch.randperm(position + 1, device=q.device)[:count]
        listed[:count] = drawn.sort().values
    return q, k, cache, shape, chosen


def _choice_error(
    index: IndexShape, pasts: list[int], rows: int, dtype: torch.dtype, device: torch.device
) -> float:
    """By how much scores that were left out are above chosen ones, of their standard deviation."""
    qk, weights, _, cache = index_problem(index, pasts, rows, dtype, device)
    heads = qk.view(len(qk), -1, index.dim)
    query, key = heads.split([index.heads, 1], 1)
    new_last = rows == 1  # a new key comes to the ring when it is chosen from
    sequences = [] if new_last else list(reference.device_keys(key, cache))
    chosen = choose(qk, weights, index, cache, None, None)
    sequences = list(reference.device_keys(key, cache)) if new_last else sequences
    worst = 0.0
    for own, first, keys in sequences:
        scores = index_scores(query[own].double(), keys.double(), weights[own].double())
        for row, (found, listed) in enumerate(zip(scores, chosen[own], strict=True)):
            seen, count = found[: first + row + 1], min(index.top, first + row + 1)
            best = seen.sort(descending=True).values[:count]
            mine = seen[listed[:count].long()].sort(descending=True).values
            worst = max(worst, float((best - mine).abs().max() / (seen.std() + 1e-6)))
    return worst


def _error(build: Callable[[], _Attention]) -> float:
    operands = build()
    return relative_rms(chosen_attention(*operands), reference.chosen_attention(*operands))


def cases(quick: bool, models: Sequence[ModelShape]) -> Iterator[TimedCase]:
    """The choice, and attention to it, at steps of decoding and of pieces of prompts."""
    for name, (index, heads) in list(_MODELS.items())[:1] if quick else _MODELS.items():
        for context in _CONTEXTS[1:2] if quick else _CONTEXTS:
            for batch, rows in ((1, 1),) if quick else (*((n, 1) for n in _BATCHES), (1, _ROWS)):
                yield _choice_case(name, index, context, batch, rows)
        for batch, rows in (*((n, 1) for n in _BATCHES), (1, _ROWS)):
            yield _attention_case(name, heads, index.top, batch, rows)


def _choice_case(name: str, index: IndexShape, context: int, batch: int, rows: int) -> TimedCase:
    form = KVFormat(index.dim, 8, 8, latent=index.keys.latent)
    packed = batch * context // 64 * form.nbytes
    own = 2 * batch * rows * (index.width + index.heads) + 4 * batch * rows * index.top
    scores = 6 * 4 * batch * rows * context  # written once, read five times
    return TimedCase(
        OP,
        name,
        f"choice of {batch} x {rows} after {context} tokens",
        packed + own + scores,
        partial(_build_choice, index, context, batch, rows),
        flops=2.0 * batch * rows * context * index.heads * index.dim,
        m=batch * rows,
        tokens=context,
        footprint=packed + own + scores,
    )


def _attention_case(name: str, heads: int, top: int, batch: int, rows: int) -> TimedCase:
    context = 32768
    own = 2 * batch * rows * heads * (576 + 512) + 4 * batch * rows * top
    packed = batch * context // 64 * _FORM.nbytes
    gathered = batch * rows * top // 64 * _FORM.nbytes
    return TimedCase(
        OP,
        name,
        f"{batch} x {rows} to {top} of {context} tokens, {heads} heads",
        min(gathered, packed) + own,
        partial(_build, heads, top, context, batch, rows),
        flops=2.0 * batch * rows * top * heads * (576 + 512),
        m=batch * rows,
        tokens=context,
        group=heads,
        footprint=packed + own,
    )


def _build_choice(
    index: IndexShape, context: int, batch: int, rows: int, device: torch.device
) -> PreparedCase:
    qk, weights, _, cache = index_problem(index, [context] * batch, rows, torch.float16, device)
    out = torch.empty(len(qk), index.top, dtype=torch.int32, device=device)
    return PreparedCase(lambda: choose(qk, weights, index, cache, None, out))


def _build(
    heads: int, top: int, context: int, batch: int, rows: int, device: torch.device
) -> PreparedCase:
    operands = problem(_FORM, heads, top, [context] * batch, rows, torch.float16, device)
    return PreparedCase(lambda: chosen_attention(*operands))
