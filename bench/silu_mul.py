"""SiLU of the gate times up on a GPU: checks and cases of `bench.gpu`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch.nn.functional import silu

from bench.gpu_case import BOUNDS, Call, Case, Check, Work, dtypes, relative_rms, short
from bench.model_shapes import models
from qoff.kernels.reference import elementwise as reference
from qoff.kernels.triton.elementwise.silu_mul import silu_mul

OP = "silu_mul"


def checks(device: torch.device, tiny: bool) -> Iterator[Check]:
    for tokens, columns in ((3, 80),) if tiny else ((1, 14336), (65, 768), (1000, 28672)):
        for dtype in dtypes(device):
            name = f"{short(dtype)} {tokens}x{columns}"
            yield Check(OP, name, partial(_error, tokens, columns, dtype, device), BOUNDS[dtype])


def _error(tokens: int, columns: int, dtype: torch.dtype, device: torch.device) -> float:
    gate_up = torch.randn(tokens, 2 * columns, device=device).to(dtype)
    return relative_rms(silu_mul(gate_up), reference.silu_mul(gate_up.double()))


def cases(quick: bool) -> Iterator[Case]:
    for tokens in (16, 4096):
        for model in (model for model in models(quick) if model.gated):
            nbytes = 3 * tokens * model.intermediate * 2
            build = partial(_build, tokens, model.intermediate)
            name = f"{tokens}x{model.intermediate}"
            yield Case(OP, model.name, name, nbytes, build, m=tokens, footprint=4 * nbytes)


def _build(tokens: int, columns: int, device: torch.device) -> Work:
    gate_up = torch.randn(tokens, 2 * columns, device=device).half()

    def torch_way() -> Call:
        return lambda: silu(gate_up[:, :columns]) * gate_up[:, columns:]

    return Work(lambda: silu_mul(gate_up), {"torch silu, mul": torch_way})
