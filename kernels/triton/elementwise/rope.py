"""Rotary position embedding on a GPU: one pass over memory, pairs turned in registers."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from qoff.errors import OpError
from qoff.kernels.operands import FLOATS_AND_32, INTS, require
from qoff.kernels.triton.launch.options import LAUNCH
from qoff.kernels.triton.launch.sizes import cdiv, next_power_of_2


@triton.jit
def turned(a, b, cos, sin, DTYPE: tl.constexpr):
    """The pair (a, b) turned by an angle, rounded to DTYPE."""
    a, b = a.to(tl.float32), b.to(tl.float32)
    return (a * cos - b * sin).to(DTYPE), (b * cos + a * sin).to(DTYPE)


@triton.jit
def rope_kernel(
    x,
    positions,
    cos,
    sin,
    out,
    heads,
    token_stride,  # of x
    PAIRS: tl.constexpr,  # R / 2
    PAIRS_PADDED: tl.constexpr,
    REST: tl.constexpr,  # D - R
    REST_PADDED: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Turn HEADS heads of one token."""
    D: tl.constexpr = 2 * PAIRS + REST
    DTYPE: tl.constexpr = out.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pair = tl.arange(0, PAIRS_PADDED)[None, :]
    angle = tl.load(positions + token).to(tl.int64) * PAIRS + pair
    c = tl.load(cos + angle, mask=pair < PAIRS, other=0.0)
    s = tl.load(sin + angle, mask=pair < PAIRS, other=0.0)
    source = x + token * token_stride + head[:, None] * D
    target = out + token * heads * D + head[:, None] * D
    mask = (head < heads)[:, None] & (pair < PAIRS)
    a = tl.load(source + pair, mask=mask, other=0.0)
    b = tl.load(source + PAIRS + pair, mask=mask, other=0.0)
    a, b = turned(a, b, c, s, DTYPE)
    tl.store(target + pair, a, mask=mask)
    tl.store(target + PAIRS + pair, b, mask=mask)
    if REST > 0:
        channel = tl.arange(0, REST_PADDED)[None, :]
        mask = (head < heads)[:, None] & (channel < REST)
        kept = tl.load(source + channel + 2 * PAIRS, mask=mask, other=0.0)
        tl.store(target + channel + 2 * PAIRS, kept, mask=mask)


def rope(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x [T, H, D] with pairs of its first R channels turned by the angles of positions [T].

    x: float16, bfloat16 or float32; its tokens may lie apart (a slice of a fused projection), each
    token's heads are contiguous. positions: int32 or int64, below P (not checked, as that would
    wait for the GPU). cos, sin: float32 [P, R/2]. Column i turns channels i and i + R/2; channels
    from R on are copied. Values are those of `reference.elementwise.rope`: float32 inside, rounded
    once. Raises OpError.
    """
    require("x", x, FLOATS_AND_32, ("T", "H", "D"), x.device, rows_apart=True)
    tokens, heads, head_dim = x.shape
    require("positions", positions, INTS, (tokens,), x.device)
    check_tables(cos, sin, head_dim, x.device)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    options = _options(heads, head_dim, cos.shape[1])
    rope_kernel[(tokens, cdiv(heads, options["HEADS"]))](
        x,
        positions,
        cos,
        sin,
        out,
        heads,
        x.stride(0),
        **options,
        num_stages=1,
        **LAUNCH,
    )
    return out


def check_tables(cos: Tensor, sin: Tensor, head_dim: int, device: torch.device) -> None:
    """Raise OpError unless cos and sin are rotary tables that fit a head."""
    require("cos", cos, (torch.float32,), ("P", "R/2"), device)
    require("sin", sin, (torch.float32,), cos.shape, device)
    if not 1 <= cos.shape[1] <= head_dim // 2:
        raise OpError(
            f"cos [P, R/2] turns R channels, from 2 up to the head size {head_dim}, "
            f"not {2 * cos.shape[1]}"
        )


@cache
def _options(heads: int, head_dim: int, pairs: int) -> dict[str, int]:
    """Up to 2048 values in a program, 16 a thread."""
    padded, rest = next_power_of_2(head_dim), head_dim - 2 * pairs
    together = min(max(1, 2048 // padded), next_power_of_2(heads))
    return {
        "PAIRS": pairs,
        "PAIRS_PADDED": next_power_of_2(pairs),
        "REST": rest,
        "REST_PADDED": next_power_of_2(max(rest, 1)),
        "HEADS": together,
        "num_warps": max(1, together * padded // 512),
    }
