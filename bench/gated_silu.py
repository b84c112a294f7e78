"""SiLU of the gate times up on a GPU: checks and cases of `bench.gpu`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from bench.gpu_case import BOUNDS, Call, Case, Check, Work, dtypes, relative_rms, short
from bench.model_shapes import models
from qoff.kernels.reference.experts import activate
from qoff.kernels.triton.elementwise.gated_silu import gated_silu

OP = "gated_silu"


def checks(device: torch.device, tiny: bool) -> Iterator[Check]:
    for tokens, columns in ((3, 80),) if tiny else ((1, 14336), (65, 768), (1000, 28672)):
        for dtype in dtypes(device):
            name = f"{short(dtype)} {tokens}x{columns}"
            yield Check(OP, name, partial(_error, tokens, columns, dtype, device), BOUNDS[dtype])


def _error(tokens: int, columns: int, dtype: torch.dtype, device: torch.device) -> float:
    z = torch.randn(tokens, 2 * columns, device=device).to(dtype)
    return relative_rms(gated_silu(z), activate(z.double(), "silu"))


def cases(quick: bool) -> Iterator[Case]:
    for tokens in (16, 4096):
        for model in (model for model in models(quick) if model.gated):
            nbytes = 3 * tokens * model.intermediate * 2
            build = partial(_build, tokens, model.intermediate)
            name = f"{tokens}x{model.intermediate}"
            yield Case(OP, model.name, name, nbytes, build, m=tokens, footprint=4 * nbytes)


def _build(tokens: int, columns: int, device: torch.device) -> Work:
    z = torch.randn(tokens, 2 * columns, device=device).half()

    def torch_way() -> Call:
        return lambda: activate(z, "silu")

    return Work(lambda: gated_silu(z), {"torch silu, mul": torch_way})
