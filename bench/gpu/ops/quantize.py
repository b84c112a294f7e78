"""Quantizing matrices on a GPU: checks and cases of `bench.gpu`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from bench.gpu.case import Check, PreparedCase, TimedCase, dtypes, short
from bench.gpu.model_shapes import ModelShape
from qoff.kernels.layout.packing import pack_codes, pack_scale_min
from qoff.kernels.reference import quantization
from qoff.kernels.triton.linear.quantize import quantize

OP = "quantize"


def checks(device: torch.device, tiny: bool) -> Iterator[Check]:
    """The share of bytes of codes that differ; infinite for scales that do."""
    shape = (5, 256) if tiny else (777, 4096)
    for dtype in (torch.float32, *dtypes(device)):
        for bits, group in ((4, 64),) if tiny else ((4, 32), (4, 64), (4, 128), (8, 64)):
            name = f"{short(dtype)} {bits} bit group {group}"
            yield Check(OP, name, partial(_error, shape, dtype, bits, group, device), 0.0)


def _error(
    shape: tuple[int, int], dtype: torch.dtype, bits: int, group: int, device: torch.device
) -> float:
    w = torch.randn(shape, device=device).to(dtype)
    found = quantize(w, bits, group)
    levels, scale, minimum = quantization.quantize(w, bits, group)
    if not torch.equal(found.scale_min, pack_scale_min(scale, minimum, "split32")):
        return float("inf")
    return float((found.codes != pack_codes(levels, bits, "split32")).float().mean())


def cases(quick: bool, models: Sequence[ModelShape]) -> Iterator[TimedCase]:
    for model in models[:1] if quick else models[:2]:
        n, k = model.linears()["gate/up"]
        nbytes = n * k * 2 + n * k // 2 + n * k // 64 * 4
        build = partial(_build, n, k)
        yield TimedCase(OP, model.name, f"{n}x{k} 4 bit", nbytes, build, footprint=2 * nbytes)


def _build(n: int, k: int, device: torch.device) -> PreparedCase:
    w = torch.randn(n, k, dtype=torch.float16, device=device)
    return PreparedCase(lambda: quantize(w, 4, 64))
