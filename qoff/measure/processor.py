"""What a processor takes for products by rows, and for attention by context and heads."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from qoff.kernels.layout.heads import HeadShape
from qoff.kernels.layout.kv_format import BLOCK_TOKENS, KVFormat
from qoff.kernels.layout.layer_cache import BlockTable, PackedTokens
from qoff.kernels.layout.packing import BITS, packed_shapes
from qoff.kernels.layout.qexperts import ExpertsMlp, QExperts
from qoff.kernels.layout.qtensor import QTensor
from qoff.kernels.layout.ragged import Ragged
from qoff.kernels.ops import Ops
from qoff.kvcache import PlainCache
from qoff.memory.arena import map_pages
from qoff.plan.processor import Curve, Processor, Surface

from .machine import machine

POOL = 64 << 20  # bytes that are read in turn, more than caches hold
_SIZE, _GROUP = 4096, 32  # rows and columns of a matrix, columns of a group
_SHARE = 1024  # rows of it that a CPU multiplies many rows of x with, to save time
_ROWS = (1, 2, 4, 8, 16, 32, 64, 256, 512)
_FEW = (1, 16, 256)  # of other bits than 4
_NARROW = (16, 256)  # of activations of 8 bits
_NEAR = (1, 2, 4, 8, 16, 64)  # of a matrix that is in the last cache
_EXPERT, _TOP_K, _GROUPS = (1536, 2048, 768), 8, 4  # rows, columns, inner size; of them at once
_OF_EXPERTS = (1, 4, 16, 64, 256)  # rows of each
_OF_CACHE = 0.8  # of which a layer's matrices may take so much
_WIDE, _MANY_ROWS = 2048, (64, 512)  # of matrices of floats
_CONTEXTS, _TOKENS = (64, 512, 4096), 8192  # of a sequence that is attended to; of all of them
_QUERIES = (1, 8, 64)  # of a KV head: decoding, and pieces of prompts
_PROMPTS = (64, 512, 2048)  # tokens
_RANDOM = 64 << 10  # bytes that differ, at most
_LEAST_S = 0.01  # of a sample


def of_cpu() -> Processor:
    """This machine's cores together."""
    from qoff.kernels.cpu import ops

    matmul = _matmul(ops.w4_linear, ops.PACKING, "cpu", torch.float32)
    near = _matmul(ops.w4_linear, ops.PACKING, "cpu", torch.float32, {4: _NEAR}, near=True)
    rounded = partial(ops.w4_linear, activation_bits=8)
    forms = dict.fromkeys((4, 8), _NARROW)
    narrow = _matmul(rounded, ops.PACKING, "cpu", torch.float32, forms)
    matmul |= {"16": _dense(torch.bfloat16, "cpu"), "32": _dense(torch.float32, "cpu")}
    small = random_matrix((64, 64), 4, ops.PACKING)
    x = torch.randn(1, 64)
    call = seconds_of(lambda: ops.w4_linear(x, small))
    attention = {
        "4": _packed(4),
        "8": _packed(8),
        "32": tuple((float(n), _floats(ops, n)) for n in _CONTEXTS),
    }
    prompts = tuple((float(tokens), _prompt(ops, tokens)) for tokens in _PROMPTS)
    memory = torch.ones(POOL // 4)
    rate = memory.nbytes / seconds_of(memory.sum)
    cache = int(_OF_CACHE * machine()["l3_bytes"])
    return Processor(matmul, attention, prompts, rate, call, near, cache, narrow, _experts(ops))


def of_gpu(device: torch.device) -> Processor:
    """A GPU, whose attention is taken to be limited by its memory."""
    from qoff.kernels.triton import ops

    def linear(x: Tensor, matrix: QTensor) -> object:
        result = ops.w4_linear(x, matrix)
        torch.cuda.synchronize(device)
        return result

    place = str(device)
    forms = {4: _ROWS, 8: _FEW}  # others are widened to these
    matmul = _matmul(linear, ops.PACKING, place, torch.float16, forms)
    matmul |= {"16": _dense(torch.bfloat16, place), "32": _dense(torch.float32, place)}
    small = random_matrix((64, 64), 4, ops.PACKING, place)
    x = torch.randn(1, 64, dtype=torch.float16, device=device)
    call = seconds_of(lambda: ops.w4_linear(x, small))
    source = torch.ones(1 << 30, dtype=torch.uint8, device=device)
    into = torch.empty_like(source)

    def copied() -> None:
        into.copy_(source)
        torch.cuda.synchronize(device)

    rate = 2 * source.nbytes / seconds_of(copied)
    dense = torch.randn(4096, 4096, dtype=torch.float16, device=device)

    def multiplied() -> None:
        torch.mm(dense, dense)
        torch.cuda.synchronize(device)

    flops = 2 * 4096**3 / seconds_of(multiplied)
    limited: Surface = ((1.0, ((1.0, 1 / (0.7 * rate)),)),)
    attention = dict.fromkeys(("4", "8", "32"), limited)
    return Processor(matmul, attention, ((1.0, 4 / (0.5 * flops)),), rate, call)


def seconds_of(call: Callable[[], object], warm: bool = False) -> float:
    """Seconds of a call, by as many as can be measured. warm: it has been done before."""
    if not warm:
        call()
    start = time.perf_counter()
    call()
    once = time.perf_counter() - start
    if once >= _LEAST_S:
        return once
    repeat = int(_LEAST_S / max(once, 1e-7))
    start = time.perf_counter()
    for _ in range(repeat):
        call()
    return (time.perf_counter() - start) / repeat


def in_list(call: Callable[[], None]) -> Callable[[], object]:
    """Calls of a CPU's ops as jobs of a list, which rounds are; or as they are, if that fails."""
    from qoff.kernels.cpu.jit.recorder import JobRecorder

    recorder = JobRecorder()
    replay = recorder(call)
    if replay is not None and replay.stale:  # the scratch has grown meanwhile
        replay = recorder(call)
    return call if replay is None or replay.stale else replay


def _in_list(call: Callable[[], None]) -> float:
    return seconds_of(in_list(call), warm=True)


def random_matrix(shape: tuple[int, int], bits: int, packing: str, device: str = "cpu") -> QTensor:
    """A matrix of random codes, one part again and again, in groups of 32 with compact scales."""
    codes, scales = packed_shapes(shape, bits, _GROUP, packing)
    count = math.prod(codes)
    part = torch.randint(256, (math.gcd(count, _RANDOM),), dtype=torch.uint8, device=device)
    return QTensor(
        part.repeat(count // len(part)).view(codes),
        torch.full(scales, 128, dtype=torch.uint8, device=device),
        shape,
        bits,
        _GROUP,
        packing,
    )


def _matmul(
    linear: Callable[[Tensor, QTensor], object],
    packing: str,
    device: str,
    dtype: torch.dtype,
    forms: Mapping[int, tuple[int, ...]] | None = None,
    near: bool = False,
) -> dict[str, Curve]:
    """forms: rows by bits. near: of one matrix again and again, that stays in the last cache."""
    timed = _in_list if device == "cpu" else seconds_of
    found: dict[str, Curve] = {}
    for bits, rows in (forms or {bits: _ROWS if bits == 4 else _FEW for bits in BITS}).items():
        count = max(2, POOL // (_SIZE * _SIZE * bits // 8))
        one = random_matrix((_SIZE, _SIZE), bits, packing, device)
        matrices = [one] * count if near else [one, *(_copied(one) for _ in range(count - 1))]
        share = random_matrix((_SHARE, _SIZE), bits, packing) if device == "cpu" else one
        curve = []
        for m in rows:
            x = torch.randn(m, _SIZE, dtype=dtype, device=device)
            some = matrices if m < 64 else [share]
            seconds = timed(partial(_each, partial(linear, x), some))
            curve.append((float(m), seconds / len(some) / (some[0].shape[0] * _SIZE)))
        found[str(bits)] = tuple(curve)
    return found


def _copied(one: QTensor) -> QTensor:
    return replace(one, codes=one.codes.clone(), scale_min=one.scale_min.clone())


def _experts(ops: Ops) -> dict[str, Curve]:
    """Seconds for each weight of experts of 4 bits, by rows that each computes for."""
    rows, columns, inner = _EXPERT
    count, curve = _TOP_K * _GROUPS, list[tuple[float, float]]()
    matrices = [
        [random_matrix(shape, 4, ops.PACKING) for _ in range(count)]
        for shape in ((rows, columns), (columns, inner))
    ]
    gate_up, down = map(_together, matrices)
    mlp = ExpertsMlp(gate_up, down, "silu")
    for m in _OF_EXPERTS:
        x, shares = torch.randn(m, columns), torch.full((m, _TOP_K), 1 / _TOP_K)
        groups = torch.arange(count).view(_GROUPS, 1, _TOP_K).expand(-1, m, -1).contiguous()

        def compute(ids: Tensor, x: Tensor = x, shares: Tensor = shares) -> object:
            return ops.experts(x, ids, shares, mlp)

        some = list(groups) if m < 64 else [groups[0]]
        seconds = _in_list(partial(_each, compute, some))
        weights = len(some) * _TOP_K * (rows * columns + columns * inner)
        curve.append((float(m), seconds / weights))
    return {"4": tuple(curve)}


def _together(matrices: Sequence[QTensor]) -> QExperts:
    first = matrices[0]
    codes, scales = (
        torch.stack([getattr(one, name) for one in matrices]) for name in ("codes", "scale_min")
    )
    return QExperts(codes, scales, first.shape, first.bits, first.group_size, first.packing)


def _dense(dtype: torch.dtype, device: str) -> Curve:
    """Seconds for each element of a matrix of floats, by rows of x, as torch multiplies."""
    matrix, curve = torch.randn(_WIDE, _WIDE, device=device).to(dtype), []

    def multiply(x: Tensor) -> None:
        torch.mm(x, matrix.t())
        if device != "cpu":
            torch.cuda.synchronize(device)

    for m in _MANY_ROWS:
        x = torch.randn(m, _WIDE, device=device).to(dtype)
        curve.append((float(m), seconds_of(partial(multiply, x)) / _WIDE**2))
    return tuple(curve)


def _each(call: Callable[[Any], object], operands: Sequence[Any]) -> None:
    for one in operands:
        call(one)


def _packed(bits: int) -> Surface:
    """Seconds for each byte of packed K and V, by tokens of a sequence and queries of a KV head."""
    return tuple((float(tokens), _at(bits, tokens)) for tokens in _CONTEXTS)


def _at(bits: int, context: int) -> Curve:
    from qoff.kernels.cpu.packed_attention.attention import packed_attention

    heads, batch, form = 4, _TOKENS // context, KVFormat(64, bits, bits)
    blocks = context // BLOCK_TOKENS
    used = batch * blocks
    nbytes = used * heads * form.nbytes
    copies = 1 + POOL // nbytes
    pool = map_pages(copies * nbytes).view(copies * used, heads, form.nbytes)
    pool.fill_(0x35)  # codes, and float16 numbers of 0.3
    ragged = Ragged.of([1] * batch, [context] * batch)
    order = torch.randperm(copies * used).int().view(copies, batch, blocks)
    tables = [BlockTable(table.contiguous(), [context] * batch, ragged) for table in order]
    packed = [PackedTokens(form, pool, table) for table in tables]
    curve = []
    for group in _QUERIES:
        q, every = torch.randn(batch, heads * group * form.head_dim), heads * group
        some = packed if group < 16 else packed[:1]

        def attend(one: PackedTokens, q: Tensor = q, every: int = every) -> object:
            return packed_attention(q, every, one, scale=0.1)

        seconds = _in_list(partial(_each, attend, some))
        curve.append((float(group), seconds / len(some) / nbytes))
    return tuple(curve)


def _floats(ops: Ops, context: int) -> Curve:
    """Seconds for each byte of K and V that are not packed, by queries of a KV head."""
    batch, curve = _TOKENS // 2 // context, list[tuple[float, float]]()
    ragged = Ragged.of([1] * batch, [context] * batch)
    for group in _QUERIES[:2]:
        shape = HeadShape(4 * group, 4, 64, 0.125)
        nbytes = batch * context * shape.kv_heads * shape.cached_width * 4
        layers = 1 + POOL // nbytes
        cache = PlainCache([shape] * layers, batch, context + 1)
        for memory in (*cache.keys, *cache.values):
            memory.fill_(0.3)
        cache.lengths = [context] * batch
        run = cache.begin(ragged)
        qkv = torch.randn(batch, (shape.heads + 2 * shape.kv_heads) * shape.head_dim)

        def attend(layer: Any, qkv: Tensor = qkv, shape: HeadShape = shape) -> object:
            return ops.attention(qkv, shape, layer, ragged)

        opened = [run.open(number) for number in range(layers)]
        seconds = _in_list(partial(_each, attend, opened))
        curve.append((float(group), seconds / layers / nbytes))
    return tuple(curve)


def _prompt(ops: Ops, tokens: int) -> float:
    """Seconds for a query, a key and a channel of a head, where a prompt is read."""
    shape = HeadShape(16, 4, 64, 0.125)
    ragged = Ragged.of([tokens], [0])
    qkv = torch.randn(tokens, (shape.heads + 2 * shape.kv_heads) * shape.head_dim)
    cache = PlainCache([shape], 1, tokens + 1)
    layer = cache.begin(ragged).open(0)
    pairs = tokens * (tokens + 1) / 2
    found = seconds_of(lambda: ops.attention(qkv, shape, layer, ragged))
    return found / (pairs * shape.heads * shape.head_dim)
