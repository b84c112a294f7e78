"""Rounding columns one after another, their errors fed back into those before."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from qoff.kernels.cpu.jit.compiled import inner

from .parts import by_parts

_WIDE = 64  # rows at a time, whose columns stay in the first cache


@inner
def _round(columns, own, feedback, scale, minimum, groups, codes, most):
    count, rows = columns.shape
    tile = np.zeros((count, _WIDE), np.float32)
    error = np.zeros(_WIDE, np.float32)
    for first in range(0, rows, _WIDE):
        width = min(_WIDE, rows - first)
        for i in range(count):
            for r in range(width):
                tile[i, r] = columns[i, first + r]
        for i in range(count - 1, -1, -1):
            wide, least = scale[groups[i]], minimum[groups[i]]
            for r in range(width):
                at = first + r
                inverse = np.float32(0) if wide[at] == 0 else np.float32(1) / wide[at]
                level = np.rint((tile[i, r] - least[at]) * inverse)
                level = min(max(level, np.float32(0)), most)
                error[r] = own[i, at] - (least[at] + level * wide[at])
                codes[i, at] = np.uint8(level)
                columns[i, at] = error[r]
            for j in range(i):
                factor = feedback[i, j]
                for r in range(_WIDE):
                    tile[j, r] += factor * error[r]


def round_block(
    columns: Tensor,
    own: Tensor,
    feedback: Tensor,
    scale: Tensor,
    minimum: Tensor,
    groups: Tensor,
    most: int,
) -> Tensor:
    """See `kernels.reference.feedback.round_block`; of rows, each thread takes some."""
    codes = columns.new_empty(columns.shape, dtype=torch.uint8)
    rows = columns.shape[1]
    each = -(-rows // (torch.get_num_threads() * _WIDE)) * _WIDE
    within, at = feedback.numpy(), groups.numpy()

    by_parts(
        lambda values, weights, wide, least, found: _round(
            values, weights, within, wide, least, at, found, np.float32(most)
        ),
        each, columns, own, scale, minimum, codes, dim=1,
    )  # fmt: skip
    return codes
