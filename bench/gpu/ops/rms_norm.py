"""RMS norm on a GPU: checks and cases of `bench.gpu`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from bench.gpu.case import BOUNDS, Call, Check, PreparedCase, TimedCase, dtypes, relative_rms, short
from bench.gpu.model_shapes import ModelShape
from qoff.kernels.reference import elementwise as reference
from qoff.kernels.triton.elementwise.rms_norm import rms_norm

OP = "rms_norm"
_EPS = 1e-5


def checks(device: torch.device, tiny: bool) -> Iterator[Check]:
    for tokens, columns in ((3, 80),) if tiny else ((1, 4096), (65, 8192), (1000, 128), (7, 5120)):
        for dtype in dtypes(device):
            name = f"{short(dtype)} {tokens}x{columns}"
            yield Check(OP, name, partial(_error, tokens, columns, dtype, device), BOUNDS[dtype])


def _error(tokens: int, columns: int, dtype: torch.dtype, device: torch.device) -> float:
    x = torch.randn(tokens, columns, device=device).to(dtype)
    weight = torch.rand(columns, device=device).to(dtype)
    expected = reference.rms_norm(x.double(), weight.double(), _EPS)
    return relative_rms(rms_norm(x, weight, _EPS), expected)


def cases(quick: bool, models: Sequence[ModelShape]) -> Iterator[TimedCase]:
    for tokens in (16, 4096):
        for model in models:
            nbytes = 2 * tokens * model.hidden * 2 + model.hidden * 2
            build = partial(_build, tokens, model.hidden)
            name = f"{tokens}x{model.hidden}"
            yield TimedCase(OP, model.name, name, nbytes, build, m=tokens, footprint=4 * nbytes)


def _build(tokens: int, columns: int, device: torch.device) -> PreparedCase:
    x = torch.randn(tokens, columns, device=device).half()
    weight = torch.rand(columns, device=device).half()

    def torch_way() -> Call:
        return lambda: torch.nn.functional.rms_norm(x, (columns,), weight, _EPS)

    return PreparedCase(lambda: rms_norm(x, weight, _EPS), {"torch rms_norm": torch_way})
