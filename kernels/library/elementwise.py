"""RMS norm, gated SiLU and rotary embedding as ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qoff.errors import OpError
from qoff.kernels.reference import elementwise as reference

from .define import FLOATS_AND_32, Output, define, require

_POSITIONS = (torch.int32, torch.int64)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x**2) + eps) * weight, the mean over the columns of x [T, C].

    x: float16, bfloat16 or float32, weight: [C] of the same dtype. Raises OpError.
    """
    result: Tensor = _rms_norm(x, weight, eps)
    return result


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return rms_norm(x + residual), normed before the sum is rounded, and x + residual.

    Operands as of `rms_norm`, residual like x. Raises OpError.
    """
    result: tuple[Tensor, Tensor] = _add_rms_norm(x, residual, weight, eps)
    return result


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up [T, C]; gate is the first half of the columns of gate_up [T, 2C].

    float16, bfloat16 or float32. Raises OpError.
    """
    result: Tensor = _silu_mul(gate_up)
    return result


def rope(
    x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> Tensor:
    """Return x [T, H, D] with pairs of its first R channels turned by the angles of positions [T].

    x: float16, bfloat16 or float32; tokens may lie apart, a token's heads may not. positions: int32
    or int64, below P (not checked, for that would wait for the GPU). cos, sin: float32 [P, R/2].
    Column i turns channels i and i + R/2, or with `interleaved` 2i and 2i + 1. Raises OpError.
    """
    result: Tensor = _rope(x, positions, cos, sin, interleaved)
    return result


def check_tables(cos: Tensor, sin: Tensor, head_dim: int, device: torch.device) -> None:
    """Raise OpError unless cos and sin are rotary tables that fit a head."""
    require("cos", cos, (torch.float32,), ("P", "R/2"), device)
    require("sin", sin, (torch.float32,), tuple(cos.shape), device)
    if not 1 <= cos.shape[1] <= head_dim // 2:
        raise OpError(
            f"cos [P, R/2] turns R channels, from 2 up to the head size {head_dim}, "
            f"not {2 * cos.shape[1]}"
        )


def _check_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Output:
    require("x", x, FLOATS_AND_32, ("T", "C"), x.device)
    require("weight", weight, (x.dtype,), (x.shape[1],), x.device)
    if not eps >= 0:
        raise OpError(f"eps is 0 or more, not {eps}")
    return Output(x, tuple(x.shape))


def _check_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Output, Output]:
    output = _check_rms_norm(x, weight, eps)
    require("residual", residual, (x.dtype,), tuple(x.shape), x.device)
    return output, output


def _check_silu_mul(gate_up: Tensor) -> Output:
    require("gate_up", gate_up, FLOATS_AND_32, ("T", "2C"), gate_up.device)
    if gate_up.shape[1] % 2:
        raise OpError(f"gate_up has columns of gate and as many of up, not {gate_up.shape[1]}")
    return Output(gate_up, (gate_up.shape[0], gate_up.shape[1] // 2))


def _check_rope(
    x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, interleaved: bool
) -> Output:
    require("x", x, FLOATS_AND_32, ("T", "H", "D"), x.device, strided_rows=True)
    require("positions", positions, _POSITIONS, (x.shape[0],), x.device)
    check_tables(cos, sin, x.shape[2], x.device)
    return Output(x, tuple(x.shape))


def _rms_norm_launcher() -> Callable[..., Any]:
    from qoff.kernels.triton.elementwise.rms_norm import rms_norm as launch

    return lambda x, weight, eps: launch(x, weight, eps)[0]


def _add_rms_norm_launcher() -> Callable[..., Any]:
    from qoff.kernels.triton.elementwise.rms_norm import rms_norm as launch

    return lambda x, residual, weight, eps: launch(x, weight, eps, residual)


def _silu_mul_launcher() -> Callable[..., Any]:
    from qoff.kernels.triton.elementwise.silu_mul import silu_mul as launch

    return launch


def _rope_launcher() -> Callable[..., Any]:
    from qoff.kernels.triton.elementwise.rope import rope as launch

    return launch


_rms_norm = define(
    "rms_norm(Tensor x, Tensor weight, float eps) -> Tensor",
    check=_check_rms_norm,
    cuda=_rms_norm_launcher,
    cpu=reference.rms_norm,
)
_add_rms_norm = define(
    "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)",
    check=_check_add_rms_norm,
    cuda=_add_rms_norm_launcher,
    cpu=reference.add_rms_norm,
)
_silu_mul = define(
    "silu_mul(Tensor gate_up) -> Tensor",
    check=_check_silu_mul,
    cuda=_silu_mul_launcher,
    cpu=reference.silu_mul,
)
_rope = define(
    "rope(Tensor x, Tensor positions, Tensor cos, Tensor sin, bool interleaved) -> Tensor",
    check=_check_rope,
    cuda=_rope_launcher,
    cpu=reference.rope,
)
