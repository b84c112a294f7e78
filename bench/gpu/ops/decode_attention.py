"""Decode attention over the packed KV cache on a GPU: checks and cases of `bench.gpu`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

from bench.gpu.case import (
    BOUNDS,
    Call,
    Check,
    PreparedCase,
    SerialChain,
    TimedCase,
    dtypes,
    relative_rms,
    short,
)
from bench.gpu.model_shapes import ModelShape
from bench.gpu.operands import random_cache
from bench.gpu.peers import BACKENDS, sdpa
from bench.gpu.targets import SDPA
from qoff.kernels.layout.heads import HeadShape
from qoff.kernels.layout.kv_format import BLOCK_TOKENS, KVFormat
from qoff.kernels.reference import attention as reference
from qoff.kernels.triton.attention import decode
from qoff.kernels.triton.attention.decode import DecodeConfig, decode_attention
from qoff.kernels.triton.attention.runs import Split, blocks_per_run
from qoff.kernels.triton.launch.gpu import Gpu

OP = "decode_attention"
_CONTEXTS = (1024, 8192, 32768, 131072)
_BATCHES = (1, 8, 32)
_MATH_TOKENS = 1 << 16  # the backend that materializes the scores is too slow for more


def checks(device: torch.device, tiny: bool) -> Iterator[Check]:
    forms = [KVFormat(64)]
    if not tiny:
        forms += [KVFormat(128), KVFormat(80), KVFormat(128, k_bits=8, v_bits=8), KVFormat(256)]
    lengths = [1, 70, 0] if tiny else [1, 0, 64, 65, 5000, 300]
    for form in forms:
        for dtype in dtypes(device)[:1] if tiny else dtypes(device):
            for group in (2,) if tiny else (1, 8, 16):
                kind = f"{form.k_bits}/{form.v_bits} bit, {form.head_dim} channels"
                error = partial(_error, form, dtype, group, lengths, device)
                # Queries and probabilities are rounded once more than in the reference.
                yield Check(OP, f"{short(dtype)} {kind}, group {group}", error, 2 * BOUNDS[dtype])
    for dtype in dtypes(device)[:1] if tiny else dtypes(device):
        dim, lengths = (64, [150, 0]) if tiny else (128, [70, 0, 5000, 80_000])
        error = partial(_error, KVFormat(dim), dtype, 4, lengths, device, 0.3)
        yield Check(OP, f"{short(dtype)} chosen blocks", error, 2 * BOUNDS[dtype])


def _error(
    form: KVFormat,
    dtype: torch.dtype,
    group: int,
    lengths: list[int],
    device: torch.device,
    top: float = 1.0,
) -> float:
    cache = replace(random_cache(form, 2, lengths, dtype, device), top=top)
    q = torch.randn(len(lengths), 2 * group, form.head_dim, device=device).to(dtype)
    shape = HeadShape(2 * group, 2, form.head_dim, form.head_dim**-0.5)
    out, lse = decode_attention(q, cache, shape)
    expected, expected_lse = reference.decode_attention(q, cache, shape)
    finite = torch.isfinite(expected_lse)
    if not torch.equal(finite, torch.isfinite(lse)):
        return float("inf")
    return max(relative_rms(out, expected), relative_rms(lse[finite], expected_lse[finite]))


def cases(quick: bool, models: Sequence[ModelShape]) -> Iterator[TimedCase]:
    for context in (8192, 32768) if quick else _CONTEXTS:
        for batch in (1, 8) if quick else _BATCHES:
            for model in models:
                yield case(model, context, batch)


def case(model: ModelShape, context: int, batch: int) -> TimedCase:
    """One token of each of `batch` sequences with `context` cached tokens."""
    form = KVFormat(model.head_dim)
    fp16 = 2 * batch * context * model.kv_heads * model.head_dim * 2
    nbytes = batch * (context // 64) * model.kv_heads * form.nbytes
    return TimedCase(
        OP,
        model.name,
        f"{batch} x {context} tokens, {model.heads}/{model.kv_heads} heads",
        nbytes + 4 * batch * model.heads * model.head_dim,
        partial(_build, model, context, batch),
        flops=4.0 * batch * context * model.heads * model.head_dim,
        m=batch,
        tokens=context,
        group=model.group,
        stored=fp16,
        footprint=nbytes + 2 * fp16,
    )


def _build(model: ModelShape, context: int, batch: int, device: torch.device) -> PreparedCase:
    call, q = problem(model, context, batch, device)
    keys: list[torch.Tensor] = []

    def peer(backend: str) -> Call:
        if backend == "math" and batch * context > _MATH_TOKENS:
            raise RuntimeError("left out: it writes all scores to memory")
        if not keys:
            shape = (2, batch, model.kv_heads, context, model.head_dim)
            keys.append(torch.randn(shape, dtype=torch.float16, device=device))
        return sdpa(backend, q[:, :, None], keys[0][0], keys[0][1], causal=False)

    peers = {SDPA + name: partial(peer, name) for name in BACKENDS}
    return PreparedCase(call, peers, chain=_chain(model, context, batch, device))


def _chain(model: ModelShape, context: int, batch: int, device: torch.device) -> SerialChain:
    """What a program of the longest run does in series, and after it the merge.

    How many blocks it has and where they are in the table, then block after block; the merge loads
    once. It counts a latency for each block though some of it is hidden by the block before: a call
    that beats the limit does that.
    """
    form = KVFormat(model.head_dim)
    columns = 8 if model.group <= 8 else 16
    tiles = model.kv_heads * -(-model.group // columns)
    config = decode._configured(device, torch.float16, form, columns)
    blocks = max(0, context - 1) // BLOCK_TOKENS
    processors = Gpu.of(device).processors
    split = Split(tiles, batch, processors, config.resident, blocks, BLOCK_TOKENS)
    run = blocks_per_run(split, blocks)
    return SerialChain(launches=2, loads=2 + min(run, blocks) + 1)


def problem(
    model: ModelShape,
    context: int,
    batch: int,
    device: torch.device,
    dtype: torch.dtype = torch.float16,
) -> tuple[Callable[..., object], torch.Tensor]:
    """A call that attends to a random cache, given a `DecodeConfig` or none, and its queries."""
    form = KVFormat(model.head_dim)
    cache = random_cache(form, model.kv_heads, [context] * batch, dtype, device)
    q = torch.randn(batch, model.heads, model.head_dim, device=device).to(dtype)
    shape = HeadShape(model.heads, model.kv_heads, model.head_dim, model.head_dim**-0.5)

    def attend(config: DecodeConfig | None = None) -> object:
        return decode_attention(q, cache, shape, config=config)

    return attend, q
