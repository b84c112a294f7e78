"""Rotary position embedding on a GPU: checks and cases of `bench.gpu`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from bench.gpu_case import BOUNDS, Call, Case, Check, Work, dtypes, relative_rms, short
from bench.model_shapes import models
from qoff.kernels.reference import elementwise as reference
from qoff.kernels.triton.elementwise.rope import rope

OP = "rope"
POSITIONS = 8192


def tables(
    head_dim: int, device: torch.device, positions: int = POSITIONS
) -> tuple[Tensor, Tensor]:
    """cos and sin float32 [P, D/2] of base 10000."""
    exponent = torch.arange(0, head_dim, 2, device=device, dtype=torch.float64) / head_dim
    position = torch.arange(positions, device=device, dtype=torch.float64)
    angle = position[:, None] * 10000.0 ** -exponent[None, :]
    return angle.cos().float(), angle.sin().float()


def checks(device: torch.device, tiny: bool) -> Iterator[Check]:
    shapes = (
        ((3, 2, 64, 32),) if tiny else ((1, 32, 128, 128), (1000, 8, 128, 128), (65, 5, 80, 32))
    )
    for tokens, heads, head_dim, width in shapes:
        for dtype in dtypes(device):
            name = f"{short(dtype)} {tokens}x{heads}x{head_dim} of {width}"
            error = partial(_error, (tokens, heads, head_dim), width, dtype, device)
            yield Check(OP, name, error, BOUNDS[dtype])


def _error(
    shape: tuple[int, int, int], width: int, dtype: torch.dtype, device: torch.device
) -> float:
    x = torch.randn(shape, device=device).to(dtype)
    positions = torch.randint(0, 100, shape[:1], device=device)
    cos, sin = tables(width, device, 100)
    expected = reference.rope(x.double(), positions, cos.double(), sin.double())
    return relative_rms(rope(x, positions, cos, sin), expected)


def cases(quick: bool) -> Iterator[Case]:
    for tokens in (16, 4096):
        for model in models(quick):
            size = tokens * model.heads * model.head_dim
            nbytes = 2 * size * 2 + tokens * model.head_dim * 4
            build = partial(_build, tokens, model.heads, model.head_dim)
            name = f"{tokens}x{model.heads}x{model.head_dim}"
            yield Case(OP, model.name, name, nbytes, build, m=tokens, footprint=6 * nbytes)


def _build(tokens: int, heads: int, head_dim: int, device: torch.device) -> Work:
    x = torch.randn(tokens, heads, head_dim, device=device).half()
    positions = torch.arange(tokens, device=device)
    cos, sin = tables(head_dim, device)

    def torch_way() -> Call:
        return lambda: reference.rope(x, positions, cos, sin)

    return Work(lambda: rope(x, positions, cos, sin), {"torch, several passes": torch_way})
