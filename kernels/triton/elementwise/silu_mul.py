"""silu(gate) * up on a GPU: one pass over memory."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from qoff.errors import OpError
from qoff.kernels.operands import FLOATS_AND_32, require
from qoff.kernels.triton.launch import tuned
from qoff.kernels.triton.launch.options import LAUNCH


@dataclass(frozen=True)
class SiluMulConfig:
    """`block` columns of a row in a program."""

    block: int = 1024
    num_warps: int = 4


@triton.jit
def silu_mul_kernel(gate_up, out, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    source = gate_up + row * (2 * columns) + column
    gate = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(source + columns, mask=mask, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * columns + column, value.to(out.dtype.element_ty), mask=mask)


def silu_mul(gate_up: Tensor, config: SiluMulConfig | None = None) -> Tensor:
    """Return silu(gate) * up [T, C] for contiguous gate_up [T, 2C], gate its first C columns.

    gate_up: float16, bfloat16 or float32. Values are those of `reference.elementwise.silu_mul`:
    float32 inside, rounded once. Raises OpError.
    """
    require("gate_up", gate_up, FLOATS_AND_32, ("T", "2C"), gate_up.device)
    if gate_up.shape[1] % 2:
        raise OpError(f"gate_up has columns of gate and as many of up, not {gate_up.shape[1]}")
    tokens, columns = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(tokens, columns)
    config = config or _configured(gate_up.device, columns)
    silu_mul_kernel[(tokens, triton.cdiv(columns, config.block))](
        gate_up,
        out,
        columns,
        BLOCK=config.block,
        num_warps=config.num_warps,
        num_stages=1,
        **LAUNCH,
    )
    return out


@cache
def _configured(device: torch.device, columns: int) -> SiluMulConfig:
    return SiluMulConfig(**(tuned.lookup("silu_mul", device, f"{columns}") or {}))
