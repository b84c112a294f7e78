"""Hadamard rotations: queries for K that was rotated before it was quantized, and V."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from qoff.kernels.reference.kv_blocks import hadamard


def rotate(q: Tensor) -> tuple[Tensor, float]:
    """Return (r, factor): q [..., D] times the orthonormal Hadamard matrix is r * factor.

    r has q's type; signs and a power of two are exact in it, so r is rounded once.
    """
    dim = q.shape[-1]
    power = 2.0 ** -((dim.bit_length() - 1) // 2)
    return q @ _signs(dim, power, q.dtype, q.device), dim**-0.5 / power


def value_run(head_dim: int) -> int:
    """Neighbouring channels of V that are rotated together: the largest power of two there is."""
    return head_dim & -head_dim


def rotate_values(v: Tensor, back: bool = False) -> Tensor:
    """V [..., D] with each run of `value_run` channels times a Hadamard matrix; or back again.

    What attention makes of rotated V is the rotated output: weights times V commute with it.
    Each direction is orthogonal times a power of two, exact in any dtype; together they are the
    identity.
    """
    run = value_run(v.shape[-1])
    steps = run.bit_length() - 1
    power = 2.0 ** -(steps - steps // 2 if back else steps // 2)
    return (v.unflatten(-1, (-1, run)) @ _signs(run, power, v.dtype, v.device)).flatten(-2)


@cache
def _signs(dim: int, power: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return (hadamard(dim, torch.float64) * dim**0.5 * power).to(dtype).to(device)
