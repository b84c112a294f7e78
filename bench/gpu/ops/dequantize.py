"""Dequantizing matrices on a GPU: checks and cases of `bench.gpu`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from bench.gpu.case import BOUNDS, Check, PreparedCase, TimedCase, dtypes, relative_rms, short
from bench.gpu.model_shapes import ModelShape
from bench.gpu.operands import random_weight
from qoff.kernels.triton.linear.dequantize import dequantize

OP = "dequantize"


def checks(device: torch.device, tiny: bool) -> Iterator[Check]:
    shape = (5, 256) if tiny else (777, 4096)
    for dtype in dtypes(device):
        for bits, group in ((4, 64), (8, 32)) if tiny else ((4, 32), (4, 64), (4, 128), (8, 64)):
            name = f"{short(dtype)} {bits} bit group {group}"
            yield Check(OP, name, partial(_error, shape, dtype, bits, group, device), BOUNDS[dtype])


def _error(
    shape: tuple[int, int], dtype: torch.dtype, bits: int, group: int, device: torch.device
) -> float:
    q = random_weight(*shape, device, bits, group)
    out = dequantize(q, dtype)
    return relative_rms(out, q.dequantize())


def cases(quick: bool, models: Sequence[ModelShape]) -> Iterator[TimedCase]:
    for model in models[:1] if quick else models[:2]:
        n, k = model.linears()["gate/up"]
        nbytes = n * k * 2 + n * k // 2 + n * k // 64 * 4
        build = partial(_build, n, k)
        yield TimedCase(OP, model.name, f"{n}x{k} 4 bit", nbytes, build, footprint=2 * nbytes)


def _build(n: int, k: int, device: torch.device) -> PreparedCase:
    q = random_weight(n, k, device)
    return PreparedCase(lambda: dequantize(q, torch.float16))
