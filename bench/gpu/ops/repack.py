"""Repacking experts on a GPU: checks and cases of `bench.gpu`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

from bench.gpu.case import Check, PreparedCase, TimedCase
from bench.gpu.model_shapes import ModelShape
from bench.gpu.operands import random_weight, together
from qoff.kernels.layout.qtensor import QTensor
from qoff.kernels.triton.moe.repack import repack_experts

OP = "repack"
_COUNT = 3  # experts of a check
_GROUP_BYTES = 64 << 20  # that come together, about


def checks(device: torch.device, tiny: bool) -> Iterator[Check]:
    shape = (24, 128) if tiny else (777, 4096)
    scales = (torch.uint8,) if tiny else (torch.uint8, torch.float16, torch.float32)
    for bits in (4, 6) if tiny else (2, 3, 4, 5, 6, 8):
        for dtype in scales:
            for group in (64,) if tiny else (32, 64, 128):
                name = f"{bits} bit group {group} scales {dtype.itemsize} bytes"
                yield Check(OP, name, partial(_error, shape, bits, group, dtype, device), 0.0)


def _error(
    shape: tuple[int, int], bits: int, group: int, scales: torch.dtype, device: torch.device
) -> float:
    """0 where every bit is right."""
    some = [_weight(shape, device, bits, group, scales) for _ in range(_COUNT)]
    wanted = together([one.for_kernels("split32") for one in some])
    into = replace(
        wanted,
        codes=torch.zeros_like(wanted.codes),
        scale_min=torch.empty_like(wanted.scale_min),
    )
    into.scale_min.view(torch.uint8).fill_(0xFF)
    repack_experts(together([one.to_packing("rows16") for one in some]), into)
    same = torch.equal(into.codes, wanted.codes) and torch.equal(into.scale_min, wanted.scale_min)
    return 0.0 if same else float("inf")


def _weight(
    shape: tuple[int, int], device: torch.device, bits: int, group: int, scales: torch.dtype
) -> QTensor:
    """As `random_weight`; compact scales are any bytes."""
    if scales != torch.uint8:
        return random_weight(*shape, device, bits, group, scales)
    one = random_weight(*shape, device, bits, group)
    some = torch.randint(256, one.scale_min.shape, dtype=torch.uint8, device=device)
    return replace(one, scale_min=some)


def cases(quick: bool, models: Sequence[ModelShape]) -> Iterator[TimedCase]:
    """Bytes are read and written once."""
    for model in (model for model in models if model.experts):
        for bits in (4,) if quick else (4, 3):
            n, k = 2 * model.intermediate, model.hidden
            each = n * k * bits // 8 + n * k // 64 * 4
            count = max(1, _GROUP_BYTES // each)
            wide = n * k // 2 + n * k // 64 * 4
            build = partial(_build, count, n, k, bits)
            nbytes = count * (each + wide)
            yield TimedCase(
                OP,
                model.name,
                f"{count} of {n}x{k} {bits} bit",
                nbytes,
                build,
                footprint=3 * nbytes,
            )


def _build(count: int, n: int, k: int, bits: int, device: torch.device) -> PreparedCase:
    one = random_weight(n, k, device, bits)
    packed = together([one.to_packing("rows16")] * count)
    into = together([one.for_kernels("split32")] * count)
    return PreparedCase(lambda: repack_experts(packed, into))
