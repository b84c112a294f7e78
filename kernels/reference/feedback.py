"""Rounding columns one after another, their errors fed back into those before, on any device."""

from __future__ import annotations

import torch
from torch import Tensor


def round_block(
    columns: Tensor,
    own: Tensor,
    feedback: Tensor,
    scale: Tensor,
    minimum: Tensor,
    groups: Tensor,
    most: int,
) -> Tensor:
    """Codes, uint8 [B, N], of B columns of a matrix, from the last to the first.

    columns: float32 [B, N], own with the errors of columns behind these; become their errors. own:
    float32 [B, N], the weights. feedback: float32 [B, B], what an error adds to columns before, by
    its row. scale, minimum: float32 [G, N], of groups of columns. groups: int64 [B], the group of
    each. most: the highest code.
    """
    inverse = torch.where(scale == 0, 0, 1 / scale)
    levels = torch.empty_like(columns)
    for i, group in reversed(list(enumerate(groups.tolist()))):
        level = torch.sub(columns[i], minimum[group], out=levels[i]).mul_(inverse[group])
        level.round_().clamp_(0, most)
        columns[i] = own[i] - torch.addcmul(minimum[group], level, scale[group])
        columns[:i].addr_(feedback[i, :i], columns[i])
    return levels.to(torch.uint8)
