"""How far a token goes: what forgetting is measured by."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def softplus(x):
    """log(1 + exp(x)) of float32, as torch has it."""
    e = tl.exp(tl.minimum(x, 20.0))
    # 1 + e has few digits of a small e.
    soft = tl.where(e < 1e-2, e * (1.0 - e * (0.5 - e * (1.0 / 3.0))), tl.log(1.0 + e))
    return tl.where(x > 20.0, x, soft)
