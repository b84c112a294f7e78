"""Scales and minima of 16 rows, in each way that they are stored, as float32 vectors."""

from __future__ import annotations

from typing import Any

import torch
from llvmlite import ir
from numba.core import types

from qoff.kernels.cpu.jit.emit import (
    I8,
    LANES,
    V_F16,
    V_F32,
    V_I32,
    const_i32,
    const_i64,
    load,
    store,
    switch,
)
from qoff.kernels.cpu.jit.simd import vector_intrinsic
from qoff.kernels.layout.packing import BITS
from qoff.kernels.layout.scales import EXPONENT, SHIFT, STEPS

COMPACT, HALF, SINGLE = 0, 1, 2  # how they are stored: the logarithm of a number's bytes
ROW_BLOCK_BYTES = 2 * LANES  # of a group's scales and minima, at a byte each
_V_I8 = ir.VectorType(I8, LANES)
_STEP = (EXPONENT - STEPS.bit_length() + 1 << 23) - 2**31  # of a zero point, downwards: - s / STEPS


def width_of(dtype: torch.dtype) -> int:
    """COMPACT, HALF or SINGLE."""
    return {1: COMPACT, 2: HALF, 4: SINGLE}[dtype.itemsize]


def _compact(b: Any, address: Any, bits: int) -> list[Any]:
    """Integer operations but for one product: those on floats have the ports of dot products."""
    span, zero = (b.zext(load(b, address, offset, _V_I8), V_I32) for offset in (0, LANES))
    span = b.shl(span, const_i32(SHIFT))
    scale = b.bitcast(b.add(span, const_i32((EXPONENT - bits) << 23)), V_F32)
    step = b.bitcast(b.add(span, const_i32(_STEP)), V_F32)
    return [scale, b.fmul(b.sitofp(zero, V_F32), step)]


def scale_and_minimum(b: Any, address: Any, width: Any, bits: int) -> list[Any]:
    """Emit what loads those of one group of a row block of codes of `bits`: two vectors.

    address: of its 16 scales, behind which the minima are. width: see `width_of`.
    """
    kinds = {
        COMPACT: lambda: _compact(b, address, bits),
        HALF: lambda: [b.fpext(load(b, address, o, V_F16), V_F32) for o in (0, 2 * LANES)],
        SINGLE: lambda: [load(b, address, o, V_F32) for o in (0, 4 * LANES)],
    }
    never = b.append_basic_block("no_scales")
    after = b.append_basic_block("scales_done")
    choice = b.switch(width, never)
    found = []
    for kind, emit in kinds.items():
        block = b.append_basic_block("scales")
        choice.add_case(const_i64(kind), block)
        b.position_at_end(block)
        found.append((emit(), block))
        b.branch(after)
    b.position_at_end(never)
    b.unreachable()
    b.position_at_end(after)
    result = []
    for place in range(2):
        phi = b.phi(V_F32)
        for values, block in found:
            phi.add_incoming(values[place], block)
        result.append(phi)
    return result


@vector_intrinsic(types.void, *[types.int64] * 4)
def store_scales(b: Any, bits: Any, width: Any, address: Any, to: Any) -> None:
    """Write 16 scales and 16 minima of one group to `to`, float32."""

    def emit(each: int) -> None:
        for i, value in enumerate(scale_and_minimum(b, address, width, each)):
            store(b, value, to, 4 * LANES * i)

    switch(b, bits, {each: (lambda each=each: emit(each)) for each in BITS})
