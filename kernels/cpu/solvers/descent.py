"""Coordinate descent on the codes of a matrix, each row by itself."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from qoff.kernels.cpu.jit.compiled import inner

from .parts import by_parts

_SWEEPS = 3


@inner
def _descend(codes, gradient, scale, hessian, order, group_size, most, sweeps):
    for row in range(len(codes)):
        own, slope, wide = codes[row], gradient[row], scale[row]
        for _ in range(sweeps):
            moved = False
            for column in order:
                step = wide[column // group_size]
                curve = hessian[column, column] * step
                if curve == 0:
                    continue
                best = np.floor(own[column] - slope[column] / curve + np.float32(0.5))
                best = min(max(best, np.float32(0)), most)
                change = best - own[column]
                if change != 0:
                    moved = True
                    own[column] = best
                    change *= step
                    across = hessian[column]
                    for i in range(len(slope)):
                        slope[i] += change * across[i]
            if not moved:
                break


def descend(
    codes: Tensor, gradient: Tensor, scale: Tensor, hessian: Tensor, order: Tensor, bits: int
) -> None:
    """Move codes to where e H e^T of each row is least in one code after another, in three sweeps.

    codes: float32 [N, K], changed, as is gradient, e H, for the errors e [N, K] of the values that
    codes stand for. scale: float32 [N, G]. hessian: float32 [K, K]. order: int64 [K], of columns.
    """
    rows = -(-len(codes) // torch.get_num_threads())
    fixed = hessian.numpy(), order.numpy(), codes.shape[1] // scale.shape[1]
    most = np.float32(2**bits - 1)
    by_parts(lambda *own: _descend(*own, *fixed, most, _SWEEPS), rows, codes, gradient, scale)
