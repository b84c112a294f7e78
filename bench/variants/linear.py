"""The quantized matmul, quantizing and dequantizing, as they are compiled for each architecture."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product

import torch

from bench.variants.variant import (
    COPIED_AHEAD,
    DTYPES,
    FROM_REGISTERS,
    NO_SHARED_IN_LOOP,
    SCALES,
    TENSOR_CORES,
    WIDE_CODES,
    Variant,
    empty,
    float_types,
)
from qoff.kernels.layout.qtensor import QTensor
from qoff.kernels.triton.linear.dequantize import dequantize
from qoff.kernels.triton.linear.linear import HOPPER_GEMV_MAX, w4_linear
from qoff.kernels.triton.linear.product import Epilogue
from qoff.kernels.triton.linear.quantize import quantize

_MANY, _FEW = 1 << 16, 1 << 10  # rows
_GEMV = frozenset({COPIED_AHEAD, TENSOR_CORES, WIDE_CODES, NO_SHARED_IN_LOOP})
_SKINNY = frozenset({TENSOR_CORES, WIDE_CODES, COPIED_AHEAD})
_GEMM = frozenset({TENSOR_CORES, FROM_REGISTERS, NO_SHARED_IN_LOOP, COPIED_AHEAD})
_GEMM_TURNED = _GEMM - {NO_SHARED_IN_LOOP}  # compact scales, and masked ones, change their layout


def variants(capability: int) -> Iterator[Variant]:
    """Both types with each number of tokens; widths, other groups, uneven K, programs along K,
    float32 scales and no bias with types in turn; groups of 32 have compact scales. Without tensor
    cores: groups and widths."""
    yield from _quantize(capability)
    yield from _dequantize(capability)
    if capability < 80:
        for bits, group in ((4, 32), (4, 64), (4, 128), (8, 64)):
            yield _linear("fma", frozenset({WIDE_CODES}), "fp16", bits, group)
        yield _linear("fma", frozenset({WIDE_CODES}), "fp16", end="-silu-residual")
        return
    most = HOPPER_GEMV_MAX if capability == 90 else 16
    for dtype, tokens in product(("fp16", "bf16"), (1, 2, 4, 8, 16)):
        if tokens <= most:
            yield _linear("gemv", _GEMV, dtype, tokens=tokens)
    yield _linear("gemv", _GEMV, "fp16", group=32)
    yield _linear("gemv", _GEMV, "bf16", group=32, tokens=min(4, most))
    yield _linear("gemv", _GEMV, "fp16", group=128, tokens=most)
    yield _linear("gemv", _GEMV, "bf16", group=128, scale="fp32", bias=False)
    yield _linear("gemv", _GEMV, "fp16", rows=_FEW)
    yield _linear("gemv", _GEMV, "bf16", even=False)
    yield _linear("gemv", _GEMV, "fp16", bits=8, tokens=most)
    yield _linear("gemv", _GEMV, "bf16", tokens=most, rows=_FEW, even=False)
    yield _linear("gemv", _GEMV, "fp16", bits=8)
    yield _linear("gemv", _GEMV, "bf16", bits=8, group=128, even=False)
    yield _linear("gemv", _GEMV, "fp16", end="-silu")
    yield _linear("gemv", _GEMV, "bf16", end="-residual")
    yield _linear("gemv", _GEMV, "bf16", tokens=most, end="-silu-residual")
    yield _linear("gemv", _GEMV, "bf16", group=32, end="-silu")
    yield from _gemm() if capability == 90 else _skinny()
    for dtype, end in (("fp16", ""), ("bf16", "-silu-residual")):
        yield _linear("add_splits", frozenset(), dtype, rows=_FEW, end=end)


def _skinny() -> Iterator[Variant]:
    for dtype, (group, tokens) in product(("fp16", "bf16"), ((64, 17), (64, 33), (32, 33))):
        yield _linear("skinny", _SKINNY, dtype, group=group, tokens=tokens)
    yield _linear("skinny", _SKINNY, "fp16", tokens=33, even=False)
    yield _linear("skinny", _SKINNY, "bf16", tokens=33, rows=_FEW)
    yield _linear("skinny", _SKINNY, "bf16", tokens=33, scale="fp32", bias=False)
    yield _linear("skinny", _SKINNY, "bf16", group=32, tokens=8)
    yield _linear("skinny", _SKINNY, "fp16", group=32, tokens=16)
    yield _linear("skinny", _SKINNY, "bf16", group=128, tokens=33)
    yield _linear("skinny", _SKINNY, "fp16", bits=8, tokens=33)
    yield _linear("skinny", _SKINNY, "fp16", tokens=33, end="-silu-residual")


def _gemm() -> Iterator[Variant]:
    """Each tile of the rule, most with formats that take many registers."""
    yield _linear("gemm", _GEMM, "bf16", tokens=4, rows=_FEW, end="-silu-residual")
    yield _linear("gemm", _GEMM_TURNED, "bf16", group=32, tokens=16)
    yield _linear("gemm", _GEMM_TURNED, "fp16", bits=8, tokens=16, even=False)
    yield _linear("gemm", _GEMM, "fp16", group=128, tokens=17)
    yield _linear("gemm", _GEMM, "bf16", group=32, tokens=64, scale="fp32", bias=False)
    yield _linear("gemm", _GEMM_TURNED, "fp16", group=32, tokens=64)
    yield _linear("gemm", _GEMM, "fp16", tokens=64, rows=_FEW)
    yield _linear("gemm", _GEMM_TURNED, "bf16", tokens=128, even=False)
    yield _linear("gemm", _GEMM, "fp16", bits=8, tokens=128, rows=_FEW)
    yield _linear("gemm", _GEMM, "bf16", group=128, tokens=256, even=False)
    yield _linear("gemm", _GEMM_TURNED, "fp16", group=32, tokens=512)


def _linear(
    kind: str,
    traits: frozenset[str],
    dtype: str,
    bits: int = 4,
    group: int = 64,
    tokens: int = 1,
    rows: int = _MANY,
    even: bool = True,
    scale: str = "",
    bias: bool = True,
    end: str = "",
) -> Variant:
    row_bytes = (1 << 16) + (0 if even else max(16, group * bits // 8))
    columns = row_bytes * 8 // bits
    codes = empty(torch.uint8, rows, row_bytes)
    scale = scale or ("u8" if group == 32 else "fp16")
    scale_min = empty(SCALES[scale], columns // group, rows, 2)
    weight = QTensor(codes, scale_min, (rows, columns), bits, group, "split32")
    x = empty(DTYPES[dtype], tokens, columns)
    silu = "silu" in end
    added = empty(DTYPES[dtype], tokens, rows // 2 if silu else rows) if "residual" in end else None
    bias_ = empty(DTYPES[dtype], rows) if bias else None
    launch = partial(w4_linear, x, weight, bias_, end=Epilogue(added, silu))
    name = f"{kind}-{dtype}-{bits}bit-group{group}-m{tokens}"
    name += ("" if rows == _MANY else "-splits") + ("" if even else "-uneven")
    name += end if bias else f"-scale{scale}-nobias"
    return Variant("w4_linear", name, f"{kind}_kernel", launch, traits, compact=scale == "u8")


def _quantize(capability: int) -> Iterator[Variant]:
    """Widths with all types and scales; groups take turns."""
    dtypes = ("fp16", "fp32") if capability < 80 else ("fp16", "fp32", "bf16")
    for i, (dtype, scale) in enumerate(product(dtypes, ("fp16", "fp32"))):
        for bits in (4, 8):
            group = (32, 64, 128)[(i + bits // 4) % 3]
            w = empty(DTYPES[dtype], 4096, 4096)
            launch = partial(quantize, w, bits, group, DTYPES[scale])
            name = f"{dtype}-{bits}bit-group{group}-scale{scale}"
            yield Variant("quantize", name, "quantize_kernel", launch)


def _dequantize(capability: int) -> Iterator[Variant]:
    """Widths and groups with all types; types of scales take turns."""
    traits = frozenset({WIDE_CODES})
    for i, (bits, group) in enumerate(product((4, 8), (32, 64, 128))):
        for j, dtype in enumerate(float_types(capability)):
            scale = ("u8", "fp16", "fp32")[(i + j) % 3]
            codes = empty(torch.uint8, 4096, 4096 * bits // 8)
            scale_min = empty(SCALES[scale], 4096 // group, 4096, 2)
            weight = QTensor(codes, scale_min, (4096, 4096), bits, group, "split32")
            launch = partial(dequantize, weight, DTYPES[dtype])
            name = f"{dtype}-{bits}bit-group{group}-scale{scale}"
            compact = scale == "u8"
            yield Variant("dequantize", name, "dequantize_kernel", launch, traits, compact=compact)
