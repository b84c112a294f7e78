"""The dynamic map of 8-bit moments, and moments dequantized by it."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

BLOCK = 256
ZERO = 127  # the code of 0 in the map with a sign


@cache
def dynamic_map(signed: bool) -> Tensor:
    """Float32 [256]: the sorted entries of bitsandbytes' `create_dynamic_map(signed)`.

    The format is that of arXiv 2110.02861. Seven decades, from 1e-7 to 1; decade i is cut into 2^i
    equal steps where there is a sign, else into 2^(i+1), whose middles are entries; 0 and 1 as
    well.
    """
    entries = [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(
            0.1, 1, 2 ** (decade + (0 if signed else 1)) + 1, dtype=torch.float64
        )
        middles = ((edges[1:] + edges[:-1]) / 2 * 10.0 ** (decade - 6)).tolist()
        entries += middles + ([-x for x in middles] if signed else [])
    return torch.tensor(sorted(entries), dtype=torch.float64).float()


def dequantized(codes: Tensor, scales: Tensor, signed: bool) -> Tensor:
    """Moments float32 [n] of codes uint8 [n] and the scales float32 [n / 256] of their blocks."""
    values = dynamic_map(signed)[codes.long()].view(-1, BLOCK)
    return (values * scales[:, None]).view(-1)
