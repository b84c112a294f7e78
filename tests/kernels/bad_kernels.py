"""Variants that test_compile must refuse, each for one reason, and one that is right."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from bench.variants.variant import (
    COPIED_AHEAD,
    FROM_REGISTERS,
    NO_SHARED_IN_LOOP,
    TENSOR_CORES,
    WIDE_CODES,
    Variant,
    empty,
)


@triton.jit
def normalize(codes, out, SIZE: tl.constexpr):
    """Every value is alive until the sum of all is known."""
    index = tl.arange(0, SIZE)
    values = tl.load(codes + index).to(tl.float32)
    tl.store(out + index, values / tl.sum(values))


@triton.jit
def every_other(codes, out, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    tl.store(out + index, tl.load(codes + 2 * index).to(tl.float32))


@triton.jit
def every_other_pair(codes, out, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    pairs = tl.load(codes.to(tl.pointer_type(tl.uint16)) + 2 * index)
    tl.store(out + index, (pairs & 255).to(tl.float32))


@triton.jit
def scaled(codes, scale_min, out, SIZE: tl.constexpr, APART: tl.constexpr, SCALES: tl.constexpr):
    """Codes that lie APART times compact scales, two bytes each, that lie SCALES apart."""
    index = tl.arange(0, SIZE)
    scales = tl.load(scale_min.to(tl.pointer_type(tl.uint16)) + SCALES * index)
    tl.store(out + index, tl.load(codes + APART * index).to(tl.float32) * scales)


@triton.jit
def product(codes, out, steps, ROWS: tl.constexpr, DTYPE: tl.constexpr):
    row = tl.arange(0, ROWS)
    tile = row[:, None] * ROWS + row[None, :]
    total = tl.zeros((ROWS, ROWS), tl.float32)
    for step in range(steps):
        values = tl.load(codes + step * ROWS * ROWS + tile).to(DTYPE)
        total = tl.dot(values, values, total, input_precision="ieee")
    tl.store(out + tile, total)


@triton.jit
def float_product(codes, out, steps, ROWS: tl.constexpr, DTYPE: tl.constexpr, TIMES: tl.constexpr):
    """Of float16 matrices, which both go to shared memory, or of bytes; TIMES to the same sums."""
    row = tl.arange(0, ROWS)
    tile = row[:, None] * ROWS + row[None, :]
    total = tl.zeros((ROWS, ROWS), tl.float32)
    for step in range(steps):
        at = step * ROWS * ROWS + tile
        right = tl.load(out.to(tl.pointer_type(tl.float16)) + at)
        left = tl.load(codes.to(tl.pointer_type(DTYPE)) + at).to(tl.float16)
        for _ in tl.static_range(TIMES):
            total = tl.dot(left, right, total)
    tl.store(out + tile, total)


@triton.jit
def turned(codes, out, steps, ROWS: tl.constexpr):
    """Adds tiles to turned ones: every step changes a layout."""
    row = tl.arange(0, ROWS)
    tile = row[:, None] * ROWS + row[None, :]
    total = tl.zeros((ROWS, ROWS), tl.float32)
    for step in range(steps):
        values = tl.load(codes + step * ROWS * ROWS + tile).to(tl.float32)
        total = tl.trans(tl.exp(total)) * values
    tl.store(out + tile, total)


@triton.jit
def unknown(codes, out):
    tl.store(out, tl.load(codes).to(tl.float32) + no_such_name)  # noqa: F821


def variants(capability: int) -> Iterator[Variant]:
    """One of each kind."""
    yield _variant("right", product, {"ROWS": 64, "DTYPE": tl.float16}, {TENSOR_CORES, WIDE_CODES})
    yield _variant("spills", normalize, {"SIZE": 1 << 13}, set(), warps=1)
    yield _variant("narrow", every_other, {"SIZE": 4096}, {WIDE_CODES})
    yield _variant("narrow-pairs", every_other_pair, {"SIZE": 2048}, {WIDE_CODES})
    apart = {"SIZE": 2048, "APART": 1, "SCALES": 2}
    yield _variant("right-narrow-scales", scaled, apart, {WIDE_CODES})
    apart = {"SIZE": 2048, "APART": 2, "SCALES": 1}
    yield _variant("narrow-wide-scales", scaled, apart, {WIDE_CODES})
    yield _variant("no-tensor-cores", product, {"ROWS": 32, "DTYPE": tl.float32}, {TENSOR_CORES})
    yield _variant("no-product", every_other, {"SIZE": 4096}, {TENSOR_CORES})
    shape = {"ROWS": 64, "DTYPE": tl.float16, "TIMES": 1}
    yield _variant("weights-in-shared", float_product, shape, {FROM_REGISTERS})
    shape = {"ROWS": 64, "DTYPE": tl.uint8, "TIMES": 3}
    yield _variant("waits-for-products", float_product, shape, {FROM_REGISTERS})
    yield _variant("not-ahead", turned, {"ROWS": 64}, {COPIED_AHEAD})
    yield _variant("shared-in-loop", turned, {"ROWS": 64}, {NO_SHARED_IN_LOOP})
    yield _variant("large", product, {"ROWS": 128, "DTYPE": tl.float16}, set(), stages=20)
    yield _variant("unknown", unknown, {}, set())


def _variant(
    name: str,
    kernel: Any,
    constants: dict[str, object],
    traits: set[str],
    warps: int = 4,
    stages: int = 3,
) -> Variant:
    sizes = {"steps": 16} if kernel in (product, float_product, turned) else {}
    codes, out = empty(torch.uint8, 1 << 20), empty(torch.float32, 1 << 20)
    operands = (codes, codes, out) if kernel is scaled else (codes, out)
    options = {"num_warps": warps, "num_stages": stages}
    launch = partial(kernel[(1,)], *operands, **sizes, **constants, **options)
    return Variant(__name__, name, kernel.__name__, launch, frozenset(traits))
