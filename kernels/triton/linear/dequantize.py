"""Packed codes back to float16 or bfloat16 on a GPU: for large matmuls, which cuBLAS then does."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from qoff.errors import OpError
from qoff.kernels.layout.qtensor import QTensor
from qoff.kernels.operands import FLOATS
from qoff.kernels.triton.launch import tuned
from qoff.kernels.triton.launch.options import LAUNCH, use_asm
from qoff.kernels.triton.launch.sizes import cdiv

from .nibbles import byte_values, load_scale_min, low_high


@dataclass(frozen=True)
class DequantizeConfig:
    """Runs of `run` bytes of codes, `block` bytes in a program: registers against programs."""

    block: int = 4096
    num_warps: int = 4


@triton.jit
def dequantize_kernel(
    codes, scale_min, out, runs, groups, scale_stride,
    RUN: tl.constexpr, RUNS: tl.constexpr, BITS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """out[run] = codes[run] * scale + minimum for RUNS of all `runs`, which lie row after row.

    A run is RUN bytes of codes with one scale. groups: runs of a row. scale_stride: pairs from one
    group of a row to its next.
    """
    DTYPE: tl.constexpr = out.dtype.element_ty
    run = tl.program_id(0).to(tl.int64) * RUNS + tl.arange(0, RUNS)
    inside = run < runs
    byte = tl.arange(0, RUN)
    mask = inside[:, None] & (byte >= 0)[None, :]
    packed = tl.load(codes + run[:, None] * RUN + byte[None, :], mask=mask, other=0)
    pair = (run % groups) * scale_stride + run // groups
    scale, minimum = load_scale_min(scale_min, pair, inside, BITS)
    if BITS == 4:
        low, high = low_high(packed, tl.float16, ASM)
        low_value = low.to(tl.float32) * scale[:, None] + minimum[:, None]
        high_value = high.to(tl.float32) * scale[:, None] + minimum[:, None]
        element = (byte // 16) * 32 + byte % 16
        target = out + run[:, None] * (2 * RUN) + element[None, :]
        tl.store(target, low_value.to(DTYPE), mask=mask)
        tl.store(target + 16, high_value.to(DTYPE), mask=mask)
    else:
        values = byte_values(packed, tl.float16, ASM).to(tl.float32)
        values = values * scale[:, None] + minimum[:, None]
        tl.store(out + run[:, None] * RUN + byte[None, :], values.to(DTYPE), mask=mask)


def dequantize(
    weight: QTensor, dtype: torch.dtype, config: DequantizeConfig | None = None
) -> Tensor:
    """Return the matrix [N, K] in `dtype`: code * scale + minimum in float32, rounded once.

    weight: packing split32. dtype: float16 or bfloat16. Raises OpError.
    """
    if weight.packing != "split32" or dtype not in FLOATS:
        raise OpError(
            "packing split32 is dequantized to float16 or bfloat16, "
            f"not packing {weight.packing} to {dtype}"
        )
    out = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    form = weight.bits, weight.group_size
    with torch.cuda.device_of(out):  # Triton launches on the current GPU
        dequantize_into(weight.codes, weight.scale_min, *form, out, config)
    return out


def dequantize_into(
    codes: Tensor,
    scale_min: Tensor,
    bits: int,
    group_size: int,
    out: Tensor,
    config: DequantizeConfig | None = None,
) -> None:
    """Dequantize rows of a matrix of packing split32 into contiguous `out` [N, K].

    Nothing is checked: `codes` and `scale_min` may be rows sliced from those of a larger matrix.
    """
    if not codes.numel():
        return
    config = config or _configured(out.device, out.dtype, bits, group_size)
    run = group_size * bits // 8
    per_program = max(1, config.block // run)
    runs = codes.numel() // run
    dequantize_kernel[(cdiv(runs, per_program),)](
        codes,
        scale_min,
        out,
        runs,
        runs // codes.shape[0],
        scale_min.stride(0) // 2,
        RUN=run,
        RUNS=per_program,
        BITS=bits,
        ASM=use_asm(),
        num_warps=config.num_warps,
        num_stages=1,
        **LAUNCH,
    )


@cache
def _configured(
    device: torch.device, dtype: torch.dtype, bits: int, group: int
) -> DequantizeConfig:
    entry = tuned.lookup("dequantize", device, f"{str(dtype)[6:]}-{bits}-{group}")
    return DequantizeConfig(**entry) if entry else DequantizeConfig()
