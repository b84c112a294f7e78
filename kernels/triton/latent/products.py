"""Products of queries with their head's matrix of keys, of what they find with that of values.

Each head has its own small matrices (`layout.latent`), quantized along the latent: a tile of one
group is dequantized in registers and multiplied on tensor cores, for any number of tokens.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from qoff.errors import OpError
from qoff.kernels.layout.ending import Norm
from qoff.kernels.layout.latent import LatentShape
from qoff.kernels.layout.qtensor import QTensor
from qoff.kernels.layout.widening import read_bits
from qoff.kernels.operands import FLOATS, FLOATS_AND_32, require
from qoff.kernels.triton.launch.bound import BoundKernel
from qoff.kernels.triton.launch.gpu import Gpu
from qoff.kernels.triton.launch.options import use_asm
from qoff.kernels.triton.launch.sizes import cdiv, next_power_of_2
from qoff.kernels.triton.linear.nibbles import (
    byte_values,
    dot16,
    load_scale_min,
    low_high,
)

_TOKENS = 64  # of a tile, at most; without tensor cores a fourth, in a fourth of the channels
_NORMED = 8  # tokens that are normed together


@triton.jit
def _group(
    codes, scale_min, row, inside, group, row_bytes, scale_stride,
    RUN: tl.constexpr, BITS: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """One group of columns of the matrix's rows `row`, [rows, RUN]: their low and high nibbles.

    Of 8 bits, twice the same.
    """
    at = codes + row.to(tl.int64)[:, None] * row_bytes + group * RUN + tl.arange(0, RUN)[None, :]
    packed = tl.load(at, mask=inside[:, None], other=0)
    scale, minimum = load_scale_min(scale_min, group * scale_stride + row, inside, BITS)
    if BITS == 4:
        low, high = low_high(packed, tl.float16, ASM)
        low = (low.to(tl.float32) * scale[:, None] + minimum[:, None]).to(DTYPE)
        high = (high.to(tl.float32) * scale[:, None] + minimum[:, None]).to(DTYPE)
    else:
        low = byte_values(packed, tl.float16, ASM)
        low = (low.to(tl.float32) * scale[:, None] + minimum[:, None]).to(DTYPE)
        high = low
    return low, high


@triton.jit
def _channels(group, RUN: tl.constexpr, BITS: tl.constexpr):
    """Channels of the latent whose codes are the low nibbles of a group; high ones are 16 on."""
    byte = tl.arange(0, RUN)
    low = group * (2 * RUN) + (byte // 16) * 32 + byte % 16
    return low if BITS == 4 else group * RUN + byte


@triton.jit(do_not_specialize=["tokens"])
def absorb_kernel(
    q,  # [M, heads * query_dim]
    kv,  # [M, head_dim]
    codes, scale_min, gain,
    out,  # [M, (heads + 1) * head_dim]
    tokens, q_stride, kv_stride, row_bytes, scale_stride, groups, eps,
    HEADS: tl.constexpr, LATENT: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, CHUNK: tl.constexpr, RUN: tl.constexpr,
    BITS: tl.constexpr, LATENT_PAD: tl.constexpr, ROPE_PAD: tl.constexpr, NORMED: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Some groups of one head's queries to latents, or (behind the last head) tokens' keys."""
    DTYPE: tl.constexpr = out.dtype.element_ty
    HALF: tl.constexpr = (LATENT + ROPE) // 2
    WIDTH: tl.constexpr = (HEADS + 1) * 2 * HALF
    h = tl.program_id(0)
    token = tl.program_id(2).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    there = token < tokens
    if h == HEADS:
        if tl.program_id(1) == 0:
            for first in tl.range(0, TOKENS, NORMED, num_stages=1):
                some = tl.program_id(2).to(tl.int64) * TOKENS + first + tl.arange(0, NORMED)
                _key(
                    kv, gain, out, some, tokens, kv_stride, WIDTH, eps, HEADS, LATENT, ROPE,
                    LATENT_PAD, ROPE_PAD,
                )  # fmt: skip
        return
    query = q + token * q_stride + h * (NOPE + ROPE)
    target = out + token * WIDTH + h * (2 * HALF)
    for group in tl.range(tl.program_id(1), groups, tl.num_programs(1), num_stages=1):
        low = tl.zeros([TOKENS, RUN], tl.float32)
        high = tl.zeros([TOKENS, RUN], tl.float32)
        for first in tl.range(0, NOPE, CHUNK, num_stages=2):
            channel = first + tl.arange(0, CHUNK)
            inside = channel < NOPE
            x = tl.load(
                query[:, None] + channel[None, :], mask=there[:, None] & inside[None, :], other=0.0
            )
            w_low, w_high = _group(
                codes, scale_min, h * ROWS + channel, inside, group, row_bytes, scale_stride,
                RUN, BITS, DTYPE, ASM,
            )  # fmt: skip
            low = dot16(x, w_low, low, ASM)
            if BITS == 4:
                high = dot16(x, w_high, high, ASM)
        channel = _channels(group, RUN, BITS)
        at = channel + (channel >= LATENT // 2) * (ROPE // 2)
        tl.store(target[:, None] + at[None, :], low.to(DTYPE), mask=there[:, None])
        if BITS == 4:
            channel += 16
            at = channel + (channel >= LATENT // 2) * (ROPE // 2)
            tl.store(target[:, None] + at[None, :], high.to(DTYPE), mask=there[:, None])
    if tl.program_id(1) == 0:
        _copy_rope(query + NOPE, target, there, LATENT, ROPE, ROPE_PAD)


@triton.jit
def _copy_rope(
    source, target, there, LATENT: tl.constexpr, ROPE: tl.constexpr, ROPE_PAD: tl.constexpr
):  # fmt: skip
    """Channels that RoPE rotates, behind those of the latent in either half."""
    channel = tl.arange(0, ROPE_PAD)
    mask = there[:, None] & (channel < ROPE)[None, :]
    x = tl.load(source[:, None] + channel[None, :], mask=mask, other=0.0)
    at = channel + LATENT // 2 + (channel >= ROPE // 2) * (LATENT // 2)
    tl.store(target[:, None] + at[None, :], x, mask=mask)


@triton.jit
def _key(
    kv, gain, out, token, tokens, kv_stride, WIDTH: tl.constexpr, eps,
    HEADS: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, LATENT_PAD: tl.constexpr,
    ROPE_PAD: tl.constexpr,
):  # fmt: skip
    """The norm of tokens' latents, and what RoPE rotates of their keys."""
    there = token < tokens
    source = kv + token * kv_stride
    target = out + token * WIDTH + HEADS * (LATENT + ROPE)
    channel = tl.arange(0, LATENT_PAD)
    mask = there[:, None] & (channel < LATENT)[None, :]
    x = tl.load(source[:, None] + channel[None, :], mask=mask, other=0.0).to(tl.float32)
    by = tl.load(gain + channel, mask=channel < LATENT, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, axis=1) / LATENT + eps)
    x = x * inverse[:, None] * by[None, :]
    at = channel + (channel >= LATENT // 2) * (ROPE // 2)
    tl.store(target[:, None] + at[None, :], x.to(out.dtype.element_ty), mask=mask)
    _copy_rope(source + LATENT, target, there, LATENT, ROPE, ROPE_PAD)


@triton.jit(do_not_specialize=["tokens"])
def expand_kernel(
    x,  # [M, heads * latent]
    codes, scale_min,
    out,  # [M, heads * value_dim]
    tokens, row_bytes, scale_stride, groups,
    HEADS: tl.constexpr, LATENT: tl.constexpr, NOPE: tl.constexpr, VALUE: tl.constexpr,
    TOKENS: tl.constexpr, CHUNK: tl.constexpr, RUN: tl.constexpr, BITS: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """CHUNK values of one head, of TOKENS tokens."""
    DTYPE: tl.constexpr = out.dtype.element_ty
    h = tl.program_id(0)
    value = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    token = tl.program_id(2).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    there = token < tokens
    row = h * (NOPE + VALUE) + NOPE + value
    found = x + token * (HEADS * LATENT) + h * LATENT
    acc = tl.zeros([TOKENS, CHUNK], tl.float32)
    for group in tl.range(0, groups, num_stages=3):
        w_low, w_high = _group(
            codes, scale_min, row, value < VALUE, group, row_bytes, scale_stride,
            RUN, BITS, DTYPE, ASM,
        )  # fmt: skip
        at = found[:, None] + _channels(group, RUN, BITS)[None, :]
        acc = dot16(tl.load(at, mask=there[:, None], other=0.0), tl.trans(w_low), acc, ASM)
        if BITS == 4:
            high = tl.load(at + 16, mask=there[:, None], other=0.0)
            acc = dot16(high, tl.trans(w_high), acc, ASM)
    target = out + (token * (HEADS * VALUE) + h * VALUE)[:, None] + value[None, :]
    tl.store(target, acc.to(DTYPE), mask=there[:, None] & (value < VALUE)[None, :])


def absorb(
    q: Tensor,
    kv: Tensor,
    weight: QTensor,
    norm: Norm,
    shape: LatentShape,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """See `reference.latent.absorb`.

    q, kv: float16 or bfloat16; their rows may lie apart. weight: packing split32, dequantized to
    their dtype. Raises OpError.
    """
    require("q", q, FLOATS, ("M", shape.heads * shape.query_dim), q.device, rows_apart=True)
    require("kv", kv, (q.dtype,), (len(q), shape.head_dim), q.device, rows_apart=True)
    require("norm", norm.weight, FLOATS_AND_32, (shape.latent,), q.device)
    _check(weight, shape, q)
    if norm.centered:
        raise OpError("the norm of latents is one by their root mean square")
    found = q.new_empty(len(q), (shape.heads + 1) * shape.head_dim)
    if len(q):
        groups = shape.latent // weight.group_size
        kernel, tokens, _ = _bound("absorb", shape, weight.bits, weight.group_size, *_tile(q))
        # A few programs for each head at decode; more tokens are programs enough.
        split = groups if len(q) <= tokens else 1
        with torch.cuda.device_of(q):  # Triton launches on the current GPU
            kernel(
                (shape.heads + 1, split, cdiv(len(q), tokens)),
                q, kv, weight.codes, weight.scale_min, norm.weight, found, len(q), q.stride(0),
                kv.stride(0), weight.codes.stride(0), weight.scale_min.stride(0) // 2, groups,
                norm.eps,
            )  # fmt: skip
    return found if out is None else out.copy_(found)


def expand(x: Tensor, weight: QTensor, shape: LatentShape, *, out: Tensor | None = None) -> Tensor:
    """See `reference.latent.expand`; x: float16 or bfloat16, contiguous. Raises OpError."""
    require("x", x, FLOATS, ("M", shape.heads * shape.latent), x.device)
    _check(weight, shape, x)
    found = x.new_empty(len(x), shape.heads * shape.value_dim)
    if len(x):
        kernel, tokens, chunk = _bound("expand", shape, weight.bits, weight.group_size, *_tile(x))
        with torch.cuda.device_of(x):
            kernel(
                (shape.heads, cdiv(shape.value_dim, chunk), cdiv(len(x), tokens)),
                x, weight.codes, weight.scale_min, found, len(x), weight.codes.stride(0),
                weight.scale_min.stride(0) // 2, shape.latent // weight.group_size,
            )  # fmt: skip
    return found if out is None else out.copy_(found)


def _check(weight: QTensor, shape: LatentShape, x: Tensor) -> None:
    wanted = (shape.rows, shape.latent)
    if weight.packing != "split32" or weight.shape != wanted or weight.device != x.device:
        raise OpError(
            f"heads' matrices are {wanted} of packing split32 on {x.device}, not {weight.shape} of "
            f"{weight.packing} on {weight.device}"
        )
    if read_bits(weight.bits, weight.packing) != weight.bits:
        raise OpError(f"heads' matrices have 4 or 8 bits here, not {weight.bits}")


def _tile(x: Tensor) -> tuple[int, int]:
    """Tokens of a tile, and the channels of a head that it has at most."""
    if Gpu.of(x.device).capability < 80:
        return 16, 16
    return max(16, min(_TOKENS, next_power_of_2(len(x)))), 64


@cache
def _bound(
    op: str, shape: LatentShape, bits: int, group_size: int, tokens: int, most: int
) -> tuple[BoundKernel, int, int]:
    """The kernel, tokens of a tile, and channels of a head in it, up to `most`."""
    channels = shape.value_dim if op == "expand" else shape.nope_dim
    chunk = max(16, min(most, next_power_of_2(channels)))
    sizes = {"HEADS": shape.heads, "LATENT": shape.latent, "NOPE": shape.nope_dim}
    run = {"TOKENS": tokens, "RUN": group_size * bits // 8, "BITS": bits, "ASM": use_asm()}
    options = {"num_warps": 4, "num_stages": 1}
    if op == "expand":
        own = {"VALUE": shape.value_dim, "CHUNK": chunk}
        return BoundKernel(expand_kernel, **sizes, **run, **own, **options), tokens, chunk
    own = {
        "ROPE": shape.rope_dim,
        "ROWS": shape.nope_dim + shape.value_dim,
        "CHUNK": chunk,
        "LATENT_PAD": next_power_of_2(shape.latent),
        "ROPE_PAD": next_power_of_2(shape.rope_dim),
        "NORMED": _NORMED,
    }
    return BoundKernel(absorb_kernel, **sizes, **run, **own, **options), tokens, chunk
