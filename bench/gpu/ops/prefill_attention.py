"""Prefill attention over packed blocks and fresh keys on a GPU: checks and cases of `bench.gpu`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from bench.gpu.case import BOUNDS, Call, Check, PreparedCase, TimedCase, dtypes, relative_rms, short
from bench.gpu.model_shapes import ModelShape
from bench.gpu.operands import random_cache
from bench.gpu.peers import BACKENDS, IN_TWO_PARTS, REPEATED, cudnn_in_two_parts, sdpa
from bench.gpu.targets import SDPA
from qoff.kernels.layout.device_cache import DeviceLayerCache
from qoff.kernels.layout.heads import HeadShape
from qoff.kernels.layout.kv_format import KVFormat
from qoff.kernels.reference import attention as reference
from qoff.kernels.triton.attention.prefill import prefill_attention

OP = "prefill_attention"
_ROWS = 2048
_CONTEXTS = (0, 8192, 32768)
_MATH_SCORES = 1 << 28


def checks(device: torch.device, tiny: bool) -> Iterator[Check]:
    forms = [KVFormat(64)]
    if not tiny:
        forms += [KVFormat(128), KVFormat(80), KVFormat(128, k_bits=8, v_bits=8), KVFormat(256)]
    starts, rows = ([0, 70], [3, 17]) if tiny else ([0, 1000, 64, 3], [300, 17, 1, 64])
    for form in forms:
        for dtype in dtypes(device)[:1] if tiny else dtypes(device):
            for group in (2,) if tiny else (1, 8):
                kind = f"{form.k_bits}/{form.v_bits} bit, {form.head_dim} channels"
                error = partial(_error, form, dtype, group, starts, rows, device)
                yield Check(OP, f"{short(dtype)} {kind}, group {group}", error, 2 * BOUNDS[dtype])


def _error(
    form: KVFormat,
    dtype: torch.dtype,
    group: int,
    starts: list[int],
    rows: list[int],
    device: torch.device,
) -> float:
    operands = problem(form, 2, group, starts, rows, dtype, device)
    out, lse = prefill_attention(*operands)
    expected, expected_lse = reference.prefill_attention(*operands)
    return max(relative_rms(out, expected), relative_rms(lse, expected_lse))


def problem(
    form: KVFormat,
    kv_heads: int,
    group: int,
    starts: list[int],
    rows: list[int],
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Tensor, Tensor, Tensor, DeviceLayerCache, HeadShape]:
    """What the launcher and the reference take."""
    cache = random_cache(form, kv_heads, starts, dtype, device, rows)
    k, v = torch.randn(2, sum(rows), kv_heads, form.head_dim, device=device).to(dtype)
    q = torch.randn(sum(rows), kv_heads * group, form.head_dim, device=device).to(dtype)
    shape = HeadShape(kv_heads * group, kv_heads, form.head_dim, form.head_dim**-0.5)
    return q, k, v, cache, shape


def cases(quick: bool, models: Sequence[ModelShape]) -> Iterator[TimedCase]:
    for context in (0, 8192) if quick else _CONTEXTS:
        for model in models:
            seen = _ROWS * context + _ROWS * (_ROWS + 1) // 2
            fp16 = 4 * (context + _ROWS) * model.kv_heads * model.head_dim
            packed = context // 64 * model.kv_heads * KVFormat(model.head_dim).nbytes
            yield TimedCase(
                OP,
                model.name,
                f"{_ROWS} after {context} tokens, {model.heads}/{model.kv_heads} heads",
                packed + 4 * _ROWS * (model.heads + model.kv_heads) * model.head_dim,
                partial(_build, model, context),
                flops=4.0 * seen * model.heads * model.head_dim,
                m=_ROWS,
                tokens=context,
                group=model.group,
                footprint=4 * fp16 + 8 * _ROWS * model.heads * model.head_dim,
            )


def _build(model: ModelShape, context: int, device: torch.device) -> PreparedCase:
    form = KVFormat(model.head_dim)
    operands = problem(form, model.kv_heads, model.group, [context], [_ROWS], torch.float16, device)
    names = [*BACKENDS, REPEATED] + [IN_TWO_PARTS] * (context > 0)
    peers = {SDPA + name: partial(_peer, name, model, context, device) for name in names}
    return PreparedCase(lambda: prefill_attention(*operands), peers)


def _peer(name: str, model: ModelShape, context: int, device: torch.device) -> Call:
    keys = context + _ROWS
    if name == "math" and model.heads * _ROWS * keys > _MATH_SCORES:
        raise RuntimeError("left out: it writes all scores to memory")

    def random(heads: int, tokens: int) -> Tensor:
        shape = (1, heads, tokens, model.head_dim)
        return torch.randn(shape, dtype=torch.float16, device=device)

    q = random(model.heads, _ROWS)
    if name in BACKENDS:
        k, v = random(model.kv_heads, keys), random(model.kv_heads, keys)
        return sdpa(name, q, k, v, causal=True)
    k, v = random(model.heads, keys), random(model.heads, keys)
    return sdpa("cudnn", q, k, v, causal=True) if name == REPEATED else cudnn_in_two_parts(q, k, v)
