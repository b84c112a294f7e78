"""Merging partial attention results on a GPU: checks and cases of `bench.gpu`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from bench.gpu.case import BOUNDS, Call, Check, PreparedCase, TimedCase, dtypes, relative_rms, short
from bench.gpu.model_shapes import ModelShape
from bench.gpu.ops.decode_attention import problem
from bench.gpu.targets import DECODE
from qoff.kernels.reference import kv_blocks
from qoff.kernels.triton.attention.merge import merge

OP = "merge"
_CONTEXT, _BATCH = 32768, 8
_PARTS = 17


def checks(device: torch.device, tiny: bool) -> Iterator[Check]:
    shapes = ((3, 2, 2, 64),) if tiny else ((2, 65, 8, 128), (33, 3, 32, 80), (200, 1, 7, 256))
    for shape in shapes:
        for dtype in dtypes(device):
            name = f"{short(dtype)} {' x '.join(map(str, shape))}"
            yield Check(OP, name, partial(_error, shape, dtype, device), BOUNDS[dtype])


def _error(shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> float:
    outs = torch.randn(shape, device=device).to(dtype)
    lses = 4 * torch.randn(shape[:3], device=device)
    lses[0] = -torch.inf
    outs[0] = torch.nan
    out, lse = merge(outs, lses)
    expected, expected_lse = kv_blocks.merge(outs.double(), lses)
    return max(relative_rms(out, expected), relative_rms(lse, expected_lse))


def cases(quick: bool, models: Sequence[ModelShape]) -> Iterator[TimedCase]:
    """As many parts as decode attention makes of long sequences, beside that op as a whole."""
    for model in models:
        size = _BATCH * model.heads * model.head_dim
        nbytes = (_PARTS + 1) * size * 2
        fp16 = 4 * _BATCH * _CONTEXT * model.kv_heads * model.head_dim
        name = f"{_PARTS} parts of {_BATCH} x {model.heads} x {model.head_dim}"
        yield TimedCase(OP, model.name, name, nbytes, partial(_build, model), footprint=fp16)


def _build(model: ModelShape, device: torch.device) -> PreparedCase:
    outs = torch.randn(_PARTS, _BATCH, model.heads, model.head_dim, device=device).half()
    lses = torch.randn(_PARTS, _BATCH, model.heads, device=device)

    def decode() -> Call:
        return problem(model, _CONTEXT, _BATCH, device)[0]

    return PreparedCase(lambda: merge(outs, lses), {DECODE: decode})
