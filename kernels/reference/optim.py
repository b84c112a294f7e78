"""Moments of 8 bits, dequantized."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 256


def dequantized(codes: Tensor, scales: Tensor) -> Tensor:
    """Moments float32 [n] of codes and the scales float32 [n / 256] of their blocks.

    codes: int8 of first moments: scale * c * |c| / 127^2; uint8 of second moments:
    scale * (c / 255)^4. Codes are linear in the square root of a mean, and in that of the root of
    a mean of squares.
    """
    c = codes.float()
    values = (c / 255) ** 4 if codes.dtype == torch.uint8 else c * c.abs() / 127**2
    return (values.view(-1, BLOCK) * scales[:, None]).view(-1)
