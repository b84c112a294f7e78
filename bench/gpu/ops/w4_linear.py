"""The matmul on packed weights on a GPU: checks and cases of `bench.gpu`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from bench.gpu.case import BOUNDS, Call, Check, PreparedCase, TimedCase, dtypes, relative_rms, short
from bench.gpu.model_shapes import TOKENS, ModelShape
from bench.gpu.operands import random_weight
from bench.gpu.peers import gemlite, tinygemm
from bench.gpu.targets import CUBLAS, GEMLITE, TINYGEMM
from qoff.kernels.layout.qtensor import QTensor
from qoff.kernels.triton.linear.linear import w4_linear
from qoff.kernels.triton.linear.scratch import Scratch, piece_bytes

OP = "w4_linear"
GROUP = 64
_TOKENS_QUICK = (1, 16, 64, 1024)


def checks(device: torch.device, tiny: bool) -> Iterator[Check]:
    shape = (48, 256) if tiny else (1040, 4096)
    formats = ((4, 64),) if tiny else ((4, 32), (4, 64), (4, 128), (8, 64))
    for m in (1, 3, 17) if tiny else (1, 2, 4, 8, 16, 17, 64, 65, 200, 1000):
        for dtype in dtypes(device)[:1] if tiny else dtypes(device):
            for bits, group in formats:
                name = f"{short(dtype)} M={m} {bits} bit group {group}"
                error = partial(_error, m, shape, dtype, bits, group, device)
                yield Check(OP, name, error, BOUNDS[dtype])


def _error(
    m: int,
    shape: tuple[int, int],
    dtype: torch.dtype,
    bits: int,
    group: int,
    device: torch.device,
) -> float:
    q = random_weight(*shape, device, bits, group)
    x = torch.randn(m, shape[1], device=device).to(dtype)
    bias = torch.randn(shape[0], device=device).to(dtype)
    out = w4_linear(x, q, bias)
    return relative_rms(out, x.double() @ q.dequantize().double().T + bias.double())


def cases(quick: bool, models: Sequence[ModelShape]) -> Iterator[TimedCase]:
    """Small M first, all models at each M: what a run that ends early has seen is a fair part."""
    for m in _TOKENS_QUICK if quick else TOKENS:
        for model in models:
            for name, (n, k) in model.linears().items():
                yield case(model.name, name, m, n, k)


def case(model: str, name: str, m: int, n: int, k: int) -> TimedCase:
    """M tokens times one matrix [N, K]."""
    packed = n * k // 2 + n * k // GROUP * 4
    nbytes = packed + 2 * m * (n + k)
    return TimedCase(
        OP,
        model,
        f"{name} {n}x{k} M={m}",
        nbytes,
        partial(_build, m, n, k),
        flops=2.0 * m * n * k,
        m=m,
        stored=n * k // 2,
        footprint=8 * n * k + 8 * m * (n + k),
    )


def _build(m: int, n: int, k: int, device: torch.device) -> PreparedCase:
    q = random_weight(n, k, device)
    x = torch.randn(m, k, device=device).half()
    peers = {
        CUBLAS: partial(_cublas, x, q),
        TINYGEMM: partial(tinygemm, x, q),
        GEMLITE: partial(gemlite, x, q),
    }
    scratch = Scratch(piece_bytes(device, x.dtype))  # as a plan of all its memory has it
    return PreparedCase(lambda: w4_linear(x, q, scratch=scratch), peers, True)


def _cublas(x: torch.Tensor, q: QTensor) -> Call:
    weight = q.dequantize(torch.float16)
    return lambda: torch.nn.functional.linear(x, weight)
