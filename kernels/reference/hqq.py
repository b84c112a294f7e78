"""Scales and minima by half-quadratic splitting, on any device.

After Badri and Shaji, "Half-Quadratic Quantization of Large Machine Learning Models" (2023): each
step splits the error into a sparse part, found by l_p shrinkage, and a dense part, which moving the
range removes. Differences: errors are in units of the scale, so that one beta serves all weights;
the scale moves as well as the minimum (least squares against the codes); and each step is judged by
the values as they are stored.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qoff.kernels.layout.hqq import BETA, CLIP, ITERATIONS, KAPPA, NORM, TINY


def hqq(groups: Tensor, scale: Tensor, minimum: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """The range with the least sum of |error|**NORM that is found from the whole range on.

    groups: float32 [N, G, g]. scale, minimum: of the whole range, float16 or float32 [N, G]; the
    results are like them. Codes are of `bits`.
    """
    top, dtype = 2**bits - 1, scale.dtype
    full = scale.float(), minimum.float()
    scale = (full[0] * (1 - CLIP / top)).to(dtype)
    minimum = (full[1] + full[0] * (CLIP / 2)).to(dtype)
    best, error = (scale, minimum), torch.full(scale.shape, torch.inf, device=scale.device)
    beta = BETA
    for _ in range(ITERATIONS):
        wide, inverse = scale.float(), torch.where(scale == 0, 0, 1 / scale.float())
        moved = groups * inverse[..., None] - (minimum.float() * inverse)[..., None]
        levels = moved.round().clamp_(0, top)
        residual = moved.sub_(levels)
        size = residual.abs().clamp_min_(TINY)
        powered = size.log2().mul_(NORM).exp2_()  # size**p, in half the time of pow
        tried = powered.sum(2) * wide**NORM
        wins = tried < error
        best = torch.where(wins, scale, best[0]), torch.where(wins, minimum, best[1])
        error = torch.where(wins, tried, error)
        # the paper's residual - shrink(residual) is residual clamped to size**(p-1) / beta
        limit = powered.div_(size).div_(beta)
        dense = torch.minimum(torch.maximum(residual, -limit), limit)
        slope, offset = line(levels, dense)
        minimum = (minimum.float() + offset * wide).to(dtype)
        scale = (wide + slope * wide).to(dtype)
        beta *= KAPPA
    return best


def line(levels: Tensor, values: Tensor, importance: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return slope and offset [N, G] of the least-squares line values = slope * levels + offset.

    importance: of columns, [G, g]. The slope is 0 where all levels of a group are equal.
    """
    if importance is None:
        mean_level, mean_value, share = levels.mean(2), values.mean(2), None
    else:
        share = importance / importance.sum(1, keepdim=True).clamp_min(TINY)
        mean_level, mean_value = (levels * share).sum(2), (values * share).sum(2)
    centered = levels - mean_level[..., None]
    weighted = centered if share is None else centered * share
    slope = (weighted * values).sum(2) / (weighted * centered).sum(2).clamp_min_(TINY)
    return slope, mean_value - slope * mean_level
