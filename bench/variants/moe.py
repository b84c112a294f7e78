"""The experts of a layer, as their kernels are compiled for each architecture."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

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
from qoff.kernels.layout.packing import packed_shapes
from qoff.kernels.layout.qexperts import ExpertsMlp, QExperts
from qoff.kernels.layout.widening import read_bits
from qoff.kernels.triton.moe.experts import experts
from qoff.kernels.triton.moe.repack import repack_experts

OP = "w4_experts"
_EXPERTS = 8
_ROW_BYTES = 1 << 12
# Type, bits, group, activation of the first product ("": the second one is meant), options.
_Form = tuple[str, int, int, str, dict[str, Any]]
_PAIRS: tuple[_Form, ...] = (
    ("fp16", 4, 64, "silu", {}),
    ("bf16", 4, 64, "", {"even": False}),
    ("bf16", 4, 32, "clamped_swiglu", {"bias": True, "scale": "u8"}),
    ("fp16", 4, 128, "gelu_tanh", {}),
    ("fp16", 4, 32, "", {"scale": "fp32", "bias": True}),
    ("fp16", 8, 64, "gelu", {"bias": True}),
    ("bf16", 8, 128, "", {}),
    ("bf16", 4, 64, "relu2", {"gated": False}),
    ("bf16", 4, 64, "silu", {"limit": 7.0}),
)
_TILES: tuple[_Form, ...] = (
    ("fp16", 4, 64, "silu", {"block": 16}),
    ("bf16", 4, 64, "silu", {"block": 32}),
    ("fp16", 4, 64, "", {"block": 32}),
    ("fp16", 4, 64, "silu", {"block": 64}),
    ("bf16", 4, 64, "", {"block": 64}),
    ("bf16", 4, 32, "clamped_swiglu", {"block": 32, "bias": True}),
    ("bf16", 4, 32, "", {"block": 16, "bias": True, "scale": "u8"}),
    ("fp16", 4, 128, "gelu_tanh", {"block": 64}),
    ("bf16", 4, 64, "", {"block": 64, "even": False, "scale": "fp32"}),
    ("fp16", 8, 64, "gelu", {"block": 64, "bias": True}),
    ("bf16", 4, 64, "relu2", {"block": 64, "gated": False}),
    ("bf16", 4, 64, "silu", {"block": 64, "limit": 7.0}),
)
# Bits, group and scales of experts that are repacked.
_REPACKED = (
    *((4, 32, "fp16"), (4, 128, "fp32"), (8, 64, "fp16"), (2, 32, "fp16"), (3, 64, "u8")),
    *((5, 64, "fp16"), (6, 128, "fp32"), (6, 32, "u8")),
)


def variants(capability: int) -> Iterator[Variant]:
    """Both products, with sizes of tiles, types, widths, groups and activations in turn, the sum,
    and repacking."""
    for dtype, bits, group, activation, options in _PAIRS:
        if capability < 80:
            traits = frozenset({WIDE_CODES})
            yield _product("fma", traits, "fp16", bits, group, activation, **options)
        else:
            traits = frozenset({TENSOR_CORES, WIDE_CODES, NO_SHARED_IN_LOOP, COPIED_AHEAD})
            yield _product("gemv", traits, dtype, bits, group, activation, **options)
    if capability >= 80:
        kind = FROM_REGISTERS if capability == 90 else WIDE_CODES
        traits = frozenset({TENSOR_CORES, COPIED_AHEAD, kind})
        for dtype, bits, group, activation, options in _TILES:
            yield _product("tile", traits, dtype, bits, group, activation, **options)
    for dtype in float_types(capability):
        for top_k in (4, 8):
            launch = _call(dtype, top_k=top_k)
            yield Variant(OP, f"sum-{dtype}-of{top_k}", "experts_sum_kernel", launch)
    for bits, group, scale in _REPACKED:
        yield _repack(bits, group, scale)


def _repack(bits: int, group: int, scale: str) -> Variant:
    """Of experts that come in the CPU's packing; their scales are the only floats."""

    def memory(packing: str, bits: int) -> QExperts:
        shape = (256, 32 * group)
        codes, scale_min = packed_shapes(shape, bits, group, packing)
        parts = empty(torch.uint8, _EXPERTS, *codes), empty(SCALES[scale], _EXPERTS, *scale_min)
        return QExperts(*parts, shape, bits, group, packing)

    packed, into = memory("rows16", bits), memory("split32", read_bits(bits, "split32"))
    name = f"repack-fp16-{bits}bit-group{group}-scale{scale}"
    launch = partial(repack_experts, packed, into)
    return Variant(OP, name, "repack_experts_kernel", launch, compact=scale == "u8")


def _product(
    kind: str,
    traits: frozenset[str],
    dtype: str,
    bits: int,
    group: int,
    activation: str,
    block: int = 0,
    even: bool = True,
    scale: str = "fp16",
    bias: bool = False,
    gated: bool = True,
    limit: float = 0.0,
) -> Variant:
    how = (activation or "silu", block, even, scale, bias)
    launch = _call(dtype, bits, group, *how, gated=gated, limit=limit)
    name = f"{kind}-{dtype}-{bits}bit-group{group}-{activation or 'down'}"
    name += ("" if scale == "fp16" else f"-scale{scale}") + "-bias" * bias
    name += (f"-m{block}" if block else "") + ("" if even else "-uneven")
    name += f"-limit{limit:g}" if limit else ""
    kernel = f"experts_{kind}_kernel"
    which = 0 if activation else 1
    return Variant(OP, name, kernel, launch, traits, which, compact=scale == "u8")


def _call(
    dtype: str,
    bits: int = 4,
    group: int = 64,
    activation: str = "silu",
    block: int = 0,
    even: bool = True,
    scale: str = "fp16",
    bias: bool = False,
    top_k: int = 2,
    gated: bool = True,
    limit: float = 0.0,
) -> partial[Tensor]:
    """A call of the op on 3 tokens."""
    row_bytes = _ROW_BYTES + (0 if even else max(16, group * bits // 8))
    width = row_bytes * 8 // bits  # of a token, and of the values between the products

    def weight(rows: int) -> QExperts:
        codes = empty(torch.uint8, _EXPERTS, rows, row_bytes)
        scale_min = empty(SCALES[scale], _EXPERTS, width // group, rows, 2)
        return QExperts(codes, scale_min, (rows, width), bits, group, "split32")

    x = empty(DTYPES[dtype], 3, width)
    matrices = weight((1 + gated) * width), weight(width)
    mlp = ExpertsMlp(*matrices, activation, gated=gated, limit=limit)
    if bias:
        biases = (empty(DTYPES[dtype], _EXPERTS, rows) for rows in (2 * width, width))
        mlp = ExpertsMlp(mlp.gate_up, mlp.down, activation, *biases)
    topk_ids, topk_weights = empty(torch.int64, 3, top_k), empty(torch.float32, 3, top_k)
    return partial(experts, x, topk_ids, topk_weights, mlp, block=block)
