"""Rounding a matrix to packed codes with a scale and a minimum per group, on a GPU."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from qoff.errors import OpError
from qoff.kernels.layout.packing import packed_shapes
from qoff.kernels.layout.qtensor import QTensor
from qoff.kernels.operands import FLOATS_AND_32, require
from qoff.kernels.triton.launch.options import LAUNCH
from qoff.kernels.triton.launch.sizes import cdiv


@dataclass(frozen=True)
class QuantizeConfig:
    """`block` weights in a program: registers against programs."""

    block: int = 4096
    num_warps: int = 4


@triton.jit
def _levels(w, minimum, scale, TOP: tl.constexpr):
    """The nearest of the levels 0..TOP as int32; adding 2**23 rounds to nearest, ties to even."""
    level = tl.div_rn(w - minimum[:, None], scale[:, None] + tl.zeros_like(w))
    level = tl.minimum(tl.maximum(level, 0.0), TOP)
    return (level + 8388608.0).to(tl.int32, bitcast=True) & 255


@triton.jit
def quantize_kernel(
    w, codes, scale_min, runs, groups, rows,
    GROUP: tl.constexpr, RUNS: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Quantize RUNS of the N * K / GROUP `runs` of a matrix with `groups` runs in each of `rows`.

    Each is read as its first and second half of every 32 weights.
    """
    TOP: tl.constexpr = 2.0**BITS - 1.0
    HALF: tl.constexpr = GROUP // 2
    SCALE: tl.constexpr = scale_min.dtype.element_ty
    run = tl.program_id(0).to(tl.int64) * RUNS + tl.arange(0, RUNS)
    inside = run < runs
    index = tl.arange(0, HALF)
    mask = inside[:, None] & (index >= 0)[None, :]
    element = run[:, None] * GROUP + ((index // 16) * 32 + index % 16)[None, :]
    first = tl.load(w + element, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(w + element + 16, mask=mask, other=0.0).to(tl.float32)
    low = tl.min(tl.minimum(first, second), axis=1)
    high = tl.max(tl.maximum(first, second), axis=1)
    poison = tl.sum(first * 0.0 + second * 0.0, axis=1)  # NaN if any weight is not finite
    scale = (tl.div_rn(high - low, tl.full((RUNS,), TOP, tl.float32)) + poison).to(SCALE)
    minimum = (low + 0.0 + poison).to(SCALE)  # never -0.0, as in the reference
    wide = scale.to(tl.float32)
    wide = tl.where(wide == 0.0, float("inf"), wide)  # such a group is its minimum
    base = minimum.to(tl.float32)
    first_level = _levels(first, base, wide, TOP)
    second_level = _levels(second, base, wide, TOP)
    if BITS == 4:
        packed = (first_level | (second_level << 4)).to(tl.uint8)
        tl.store(codes + run[:, None] * HALF + index[None, :], packed, mask=mask)
    else:
        tl.store(codes + element, first_level.to(tl.uint8), mask=mask)
        tl.store(codes + element + 16, second_level.to(tl.uint8), mask=mask)
    pair = scale_min + ((run % groups) * rows + run // groups) * 2
    tl.store(pair, scale, mask=inside)
    tl.store(pair + 1, minimum, mask=inside)


def quantize(
    w: Tensor,
    bits: int,
    group_size: int,
    scale_dtype: torch.dtype = torch.float16,
    config: QuantizeConfig | None = None,
) -> QTensor:
    """Round w [N, K] to the nearest of 2**bits levels between each group's minimum and maximum.

    w: contiguous float16, bfloat16 or float32. scale_dtype: float16 or float32. The result, of
    packing split32, has the bits of `reference.quantization.quantize`. But a group with NaN or
    infinity gets a scale and minimum of NaN, one whose range `scale_dtype` cannot hold gets
    infinity: nothing is raised, so that the GPU need not be waited for; check that scale_min is
    finite. Raises OpError for operands of another form.
    """
    require("w", w, FLOATS_AND_32, ("N", "K"), w.device)
    if scale_dtype not in (torch.float16, torch.float32):
        raise OpError(f"scales are float16 or float32, not {scale_dtype}")
    if bits == 6:
        raise OpError("codes of 6 bits are not made on a GPU")
    shape = (w.shape[0], w.shape[1])
    codes_shape, scale_min_shape = packed_shapes(shape, bits, group_size, "split32")
    codes = torch.empty(codes_shape, dtype=torch.uint8, device=w.device)
    scale_min = torch.empty(scale_min_shape, dtype=scale_dtype, device=w.device)
    config = config or QuantizeConfig()
    runs = w.numel() // group_size
    per_program = max(1, config.block // group_size)
    with torch.cuda.device_of(w):  # Triton launches on the current GPU
        quantize_kernel[(cdiv(runs, per_program),)](
            w,
            codes,
            scale_min,
            runs,
            w.shape[1] // group_size,
            w.shape[0],
            GROUP=group_size,
            RUNS=per_program,
            BITS=bits,
            num_warps=config.num_warps,
            num_stages=1,
            **LAUNCH,
        )
    return QTensor(codes, scale_min, shape, bits, group_size, "split32")
