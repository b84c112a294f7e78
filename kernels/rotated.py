"""Queries for K that was rotated by a Hadamard matrix before it was quantized."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from .reference_kv import hadamard


def rotate(q: Tensor) -> tuple[Tensor, float]:
    """Return (r, factor): q [..., D] times the orthonormal Hadamard matrix is r * factor.

    r has q's type; signs and a power of two are exact in it, so r is rounded once.
    """
    dim = q.shape[-1]
    power = 2.0 ** -((dim.bit_length() - 1) // 2)
    return q @ _signs(dim, power, q.dtype, q.device), dim**-0.5 / power


@cache
def _signs(dim: int, power: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return (hadamard(dim, torch.float64) * dim**0.5 * power).to(dtype).to(device)
