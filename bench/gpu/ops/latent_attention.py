"""Latent attention over the packed cache on a GPU: checks and cases of `bench.gpu`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.gpu.case import BOUNDS, Call, Check, PreparedCase, TimedCase, dtypes, relative_rms, short
from bench.gpu.model_shapes import ModelShape
from bench.gpu.operands import random_cache, random_weight
from bench.gpu.peers import sdpa
from bench.gpu.targets import SDPA
from bench.gpu.tune import Search
from qoff.kernels.layout.device_cache import DeviceLayerCache
from qoff.kernels.layout.ending import Norm
from qoff.kernels.layout.heads import HeadShape, latent_values
from qoff.kernels.layout.kv_format import KVFormat
from qoff.kernels.layout.latent import LatentShape
from qoff.kernels.reference import attention as reference
from qoff.kernels.reference import latent
from qoff.kernels.triton.latent.attention import (
    LatentConfig,
    heuristic,
    latent_attention,
    tuned_key,
)
from qoff.kernels.triton.latent.products import absorb, expand

OP = "latent_attention"
_FORM = KVFormat(576, latent=512)
_MODELS = {"DeepSeek-V3": 128, "GLM-4.7-Flash": 20}  # heads
_CONTEXTS, _BATCHES, _ROWS = (1024, 8192, 32768), (1, 8, 32), 512
_TUNED = (8192,) * 8  # contexts
_MATH_TOKENS = 1 << 15  # the backend that materializes the scores is too slow for more
_Operands = tuple[Tensor, Tensor, DeviceLayerCache, HeadShape]


def checks(device: torch.device, tiny: bool) -> Iterator[Check]:
    forms = [KVFormat(96, latent=64)] if tiny else [_FORM, KVFormat(576, 8, 8, latent=512)]
    pasts = [1, 70] if tiny else [5000, 1, 64, 300]
    for form in forms:
        for dtype in dtypes(device)[:1] if tiny else dtypes(device):
            for heads, rows in ((3, 1), (3, 40)) if tiny else ((128, 1), (20, 1), (16, 200)):
                name = f"{short(dtype)} {form.k_bits} bit, {heads} heads, {rows} rows"
                error = partial(_error, form, heads, pasts, rows, dtype, device)
                yield Check(OP, name, error, 2 * BOUNDS[dtype])
    shape = LatentShape(3, 64, 16, 32, 48) if tiny else LatentShape(128, 512, 128, 64, 128)
    for dtype in dtypes(device)[:1] if tiny else dtypes(device):
        for tokens in (1, 20) if tiny else (1, 33, 500):
            error = partial(_product_error, shape, tokens, dtype, device)
            yield Check(OP, f"{short(dtype)} products, {tokens} rows", error, 2 * BOUNDS[dtype])


def problem(
    form: KVFormat,
    heads: int,
    pasts: list[int],
    rows: int,
    dtype: torch.dtype,
    device: torch.device,
) -> _Operands:
    """What the launcher takes: `rows` new tokens of each sequence, of which one is in the ring."""
    new = None if rows == 1 else [rows] * len(pasts)
    cache = random_cache(form, 1, pasts, dtype, device, new)
    both = torch.randn(rows * len(pasts), heads + 1, form.head_dim, device=device).to(dtype)
    shape = HeadShape(heads, 1, form.head_dim, form.head_dim**-0.5, latent=form.latent)
    return both[:, :heads], both[:, heads:], cache, shape


def _error(
    form: KVFormat,
    heads: int,
    pasts: list[int],
    rows: int,
    dtype: torch.dtype,
    device: torch.device,
) -> float:
    q, k, cache, shape = problem(form, heads, pasts, rows, dtype, device)
    found = latent_attention(q, k, cache, shape)
    if rows == 1:
        wanted = reference.decode_attention(q, cache, shape)
    else:
        v = latent_values(k, form.latent)
        wanted = reference.prefill_attention(q, k, v, cache, shape)
    return max(relative_rms(a, b) for a, b in zip(found, wanted, strict=True))


def _product_error(
    shape: LatentShape, tokens: int, dtype: torch.dtype, device: torch.device
) -> float:
    weight = random_weight(shape.rows, shape.latent, device, group=32)
    norm = Norm(torch.rand(shape.latent, device=device) + 0.5, 1e-6, None, False)
    q = torch.randn(tokens, shape.heads * shape.query_dim, device=device).to(dtype)
    kv = torch.randn(tokens, shape.head_dim, device=device).to(dtype)
    x = torch.randn(tokens, shape.heads * shape.latent, device=device).to(dtype)
    pairs = (
        (absorb(q, kv, weight, norm, shape), latent.absorb(q, kv, weight, norm, shape)),
        (expand(x, weight, shape), latent.expand(x, weight, shape)),
    )
    return max(relative_rms(found, wanted) for found, wanted in pairs)


def cases(quick: bool, models: Sequence[ModelShape]) -> Iterator[TimedCase]:
    """Steps of decoding, and pieces of prompts behind 8192 tokens, of models of its own."""
    for name, heads in list(_MODELS.items())[:1] if quick else _MODELS.items():
        for context in (8192, 32768) if quick else _CONTEXTS:
            for batch in (1, 8) if quick else _BATCHES:
                yield _case(name, heads, context, batch, 1)
        yield _case(name, heads, 8192, 1, _ROWS)


def _case(name: str, heads: int, context: int, batch: int, rows: int) -> TimedCase:
    packed = batch * context // 64 * _FORM.nbytes
    own = 2 * batch * rows * heads * (576 + 512)
    dense = 2 * batch * context * 576
    return TimedCase(
        OP,
        name,
        f"{batch} x {rows} after {context} tokens, {heads} heads",
        packed + own,
        partial(_build, heads, context, batch, rows),
        flops=2.0 * batch * rows * context * heads * (576 + 512),
        m=batch * rows,
        tokens=context,
        group=heads,
        stored=dense,
        footprint=packed + 2 * own + 2 * dense,
    )


def searches(dtype: torch.dtype, capability: int) -> Iterator[Search]:
    """Tiles and runs of steps of decoding."""
    keys = set[str]()
    for heads in _MODELS.values():

        def build(device: torch.device, heads: int = heads) -> Callable[[Any], Call]:
            operands = problem(_FORM, heads, list(_TUNED), 1, dtype, device)
            return lambda config: lambda: latent_attention(*operands, config=config)

        space = itertools.product((16, 32, 64), (4, 8), (32, 64), (1, 2, 3), (1, 2), (2, 4, 8))
        key = tuned_key(dtype, _FORM, heuristic(capability, heads, _FORM.k_bits))
        if key in keys:
            continue
        keys.add(key)
        yield Search(OP, key, tuple(LatentConfig(*each) for each in space), build)


def _build(heads: int, context: int, batch: int, rows: int, device: torch.device) -> PreparedCase:
    operands = problem(_FORM, heads, [context] * batch, rows, torch.float16, device)
    keys: list[Tensor] = []

    def peer(backend: str) -> Call:
        if rows > 1 or batch * context > _MATH_TOKENS:
            raise RuntimeError("left out: it writes all scores to memory")
        if not keys:
            keys.append(torch.randn(batch, 1, context, 576, dtype=torch.float16, device=device))
        q = operands[0][:, :, None]
        return sdpa(backend, q, keys[0], keys[0][..., :512], causal=False)

    peers: dict[str, Any] = {SDPA + name: partial(peer, name) for name in ("math", "efficient")}
    return PreparedCase(lambda: latent_attention(*operands), peers)
