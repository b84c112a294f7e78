"""silu(gate) * up of a fused projection whose rows alternate in blocks of 16, on a GPU."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from qoff.errors import OpError
from qoff.kernels.operands import FLOATS_AND_32, require
from qoff.kernels.triton.launch.options import LAUNCH
from qoff.kernels.triton.launch.sizes import cdiv

TURN = tl.constexpr(16)  # columns of gate, then as many of up
_BLOCK = 1024  # columns of a row in a program
_WARPS = 4


@triton.jit
def gated_silu_kernel(z, out, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    source = z + row * (2 * columns) + column // TURN * (2 * TURN) + column % TURN
    gate = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(source + TURN, mask=mask, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * columns + column, value.to(out.dtype.element_ty), mask=mask)


def gated_silu(z: Tensor) -> Tensor:
    """Return silu(gate) * up [T, C] for contiguous z [T, 2C], 16 columns of gate, 16 of up in turn.

    z: float16, bfloat16 or float32; C is a multiple of 16. Values are those of
    `reference.experts.activate` ("silu") in float32, rounded once. Raises OpError.
    """
    require("z", z, FLOATS_AND_32, ("T", "2C"), z.device)
    if z.shape[1] % (2 * TURN.value):
        raise OpError(f"z has turns of 16 columns of gate and 16 of up, not {z.shape[1]} columns")
    tokens, columns = z.shape[0], z.shape[1] // 2
    out = z.new_empty(tokens, columns)
    if tokens:
        gated_silu_kernel[(tokens, cdiv(columns, _BLOCK))](
            z, out, columns, BLOCK=_BLOCK, num_warps=_WARPS, num_stages=1, **LAUNCH
        )
    return out
