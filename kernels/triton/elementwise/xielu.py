"""The activation xIELU on a GPU."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from qoff.kernels.layout.ending import Xielu
from qoff.kernels.operands import FLOATS_AND_32, require
from qoff.kernels.triton.launch.options import LAUNCH
from qoff.kernels.triton.launch.sizes import cdiv

_BLOCK = 1024  # numbers of a program
_WARPS = 4


@triton.jit
def xielu_kernel(z, out, size, alpha_p, alpha_n, beta, eps, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    x = tl.load(z + at, mask=mask, other=0.0).to(tl.float32)
    low = tl.minimum(x, 0.0)
    to = tl.minimum(low, eps)
    series = to * (1.0 + to * (1 / 2 + to * (1 / 6 + to * (1 / 24 + to * (1 / 120)))))
    less_one = tl.where(to > -0.25, series, tl.exp(to) - 1.0)  # which cancels near 0
    value = tl.where(x > 0, alpha_p * x * x, alpha_n * (less_one - low)) + beta * x
    tl.store(out + at, value.to(out.dtype.element_ty), mask=mask)


def xielu(z: Tensor, by: Xielu) -> Tensor:
    """Return xIELU of contiguous z [T, C], float16, bfloat16 or float32.

    Values are those of `reference.linear.xielu` in float32, rounded once. Raises OpError.
    """
    require("z", z, FLOATS_AND_32, ("T", "C"), z.device)
    out, size = z.new_empty(z.shape), z.numel()
    if size:
        xielu_kernel[(cdiv(size, _BLOCK),)](
            z, out, size, *by, BLOCK=_BLOCK, num_warps=_WARPS, num_stages=1, **LAUNCH
        )
    return out
