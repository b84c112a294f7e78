"""How far a token goes: what forgetting is measured by."""

from __future__ import annotations

import numpy as np

from qoff.kernels.cpu.jit.compiled import inner


@inner
def softplus(x):
    """log(1 + exp(x)), as torch has it."""
    if x <= np.float32(20.0):
        return np.log1p(np.exp(x))
    return x
