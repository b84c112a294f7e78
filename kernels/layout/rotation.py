"""Hadamard rotations of V, which spread an outlier channel over all before V is quantized."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


def hadamard(n: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The orthonormal Hadamard matrix [n, n] of Sylvester's construction, n a power of two."""
    h = torch.ones(1, 1, dtype=torch.float64)
    while h.shape[0] < n:
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)), 0)
    return (h / n**0.5).to(dtype)


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


def rotation_signs(head_dim: int) -> Tensor:
    """What `rotate_values` multiplies a run of float32 V by on the CPU, [run, run]."""
    run = value_run(head_dim)
    power = 2.0 ** -((run.bit_length() - 1) // 2)
    return _signs(run, power, torch.float32, torch.device("cpu"))


@cache
def _signs(dim: int, power: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return (hadamard(dim, torch.float64) * dim**0.5 * power).to(dtype).to(device)
