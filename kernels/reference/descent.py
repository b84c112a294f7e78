"""Coordinate descent on the codes of a matrix, all rows at a time, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

_SWEEPS = 3  # as many as on a CPU


def descend(
    codes: Tensor, gradient: Tensor, scale: Tensor, hessian: Tensor, order: Tensor, bits: int
) -> None:
    """Move codes to where e H e^T of each row is least in one code after another, in three sweeps.

    codes: float32 [N, K], changed, as is gradient, e H, for the errors e [N, K] of the values that
    codes stand for. scale: float32 [N, G]. hessian: float32 [K, K]. order: int64 [K], of columns.
    """
    group, most, places = codes.shape[1] // scale.shape[1], 2**bits - 1, order.tolist()
    for _ in range(_SWEEPS):
        before = codes.clone()
        for column in places:
            own, step = codes[:, column], scale[:, column // group]
            curve = hessian[column, column] * step
            best = (own - gradient[:, column] / curve + 0.5).floor_().clamp_(0, most)
            change = torch.where(curve == 0, 0, best - own)
            own += change
            gradient.addr_(change * step, hessian[column])
        if torch.equal(before, codes):
            return
