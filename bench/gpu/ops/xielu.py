"""xIELU on a GPU: checks and cases of `bench.gpu`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from bench.gpu.case import (
    BOUNDS,
    Call,
    Check,
    PreparedCase,
    TimedCase,
    dtypes,
    relative_rms,
    short,
)
from bench.gpu.model_shapes import ModelShape
from qoff.kernels.layout.ending import Xielu
from qoff.kernels.reference import linear as reference
from qoff.kernels.triton.elementwise.xielu import xielu

OP = "xielu"
_LEARNED = Xielu(0.8, 1.3, 0.5, -1e-6)
_APERTUS_8B = 21504  # columns


def checks(device: torch.device, tiny: bool) -> Iterator[Check]:
    for tokens, columns in ((3, 80),) if tiny else ((1, _APERTUS_8B), (65, 768), (1000, 43008)):
        for dtype in dtypes(device):
            name = f"{short(dtype)} {tokens}x{columns}"
            yield Check(OP, name, partial(_error, tokens, columns, dtype, device), BOUNDS[dtype])


def _error(tokens: int, columns: int, dtype: torch.dtype, device: torch.device) -> float:
    z = torch.randn(tokens, columns, device=device).to(dtype)
    return relative_rms(xielu(z, _LEARNED), reference.xielu(z.double(), _LEARNED))


def cases(quick: bool, models: Sequence[ModelShape]) -> Iterator[TimedCase]:
    for tokens in (16, 4096):
        nbytes = 2 * tokens * _APERTUS_8B * 2
        name = f"{tokens}x{_APERTUS_8B}"
        build = partial(_build, tokens)
        yield TimedCase(OP, "Apertus 8B", name, nbytes, build, m=tokens, footprint=4 * nbytes)


def _build(tokens: int, device: torch.device) -> PreparedCase:
    z = torch.randn(tokens, _APERTUS_8B, device=device).half()

    def torch_way() -> Call:
        return lambda: reference.xielu(z, _LEARNED)

    return PreparedCase(lambda: xielu(z, _LEARNED), {"torch's ops": torch_way})
