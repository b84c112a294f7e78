"""Panels of many tokens, as processors with few registers multiply them."""

from __future__ import annotations

import re
from dataclasses import fields

import llvmlite.binding as llvm
import numpy as np
import pytest
from llvmlite import ir
from numba import njit, types

from qoff.kernels.cpu.jit import emit, simd
from qoff.kernels.cpu.linear import panel, tile
from qoff.kernels.cpu.linear.scratch import SUMS_BYTES, TILE_BYTES

_OPERANDS = len(fields(tile.Operands))


@pytest.mark.skipif("avx2" not in emit.host_features(), reason="needs AVX2")
@pytest.mark.parametrize(
    ("bits", "planes", "group"), [(4, 1, 32), (4, 2, 64), (6, 2, 32), (8, 1, 64), (8, 2, 128)]
)
def test_a_panel_is_its_tokens_one_by_one(bits: int, planes: int, group: int) -> None:
    i64, features = types.int64, {"avx2"}

    @simd.vector_intrinsic(types.void, *[i64] * (2 + _OPERANDS))
    def together(b, tokens, unpacked, *operands):
        o = tile.Operands(*operands)
        panel.emit_panel(b, bits, planes, tokens, unpacked, o, features)

    @simd.vector_intrinsic(types.void, *[i64] * _OPERANDS)
    def alone(b, *operands):
        tile.emit_tile(b, bits, 2, 1, planes, tile.Operands(*operands), features)

    tokens, k = 5, 256
    groups = k // group
    random = np.random.default_rng(0)
    codes = random.integers(0, 256, (2, 2 * k * bits), dtype=np.uint8)
    scale_min = random.standard_normal((2, groups, 32), dtype=np.float32)
    high, low = random.integers(-127, 128, (2, tokens, k), dtype=np.int8)
    scales = random.standard_normal((tokens, groups, 2), dtype=np.float32)
    scratch = np.zeros(TILE_BYTES, np.uint8)
    found, wanted = np.full((2, 2, tokens, 16), np.nan, np.float32)

    @njit
    def run(codes, scale_min, high, low, scales, scratch, found, wanted):
        together(tokens, scratch.ctypes.data + SUMS_BYTES, codes.ctypes.data, 2 * k * bits,
                 scale_min.ctypes.data, 128 * groups, 2, group, groups, high.ctypes.data,
                 low.ctypes.data, k, scales.ctypes.data, found.ctypes.data, 64 * tokens, 64, 0, 0,
                 codes.ctypes.data)  # fmt: skip
        for t in range(tokens):
            alone(codes.ctypes.data, 2 * k * bits, scale_min.ctypes.data, 128 * groups, 2, group,
                  groups, high.ctypes.data + t * k, low.ctypes.data + t * k, k,
                  scales.ctypes.data + 8 * t * groups, wanted.ctypes.data + 64 * t, 64 * tokens,
                  64, 0, 0, 0)  # fmt: skip

    run(codes, scale_min, high, low, scales, scratch, found, wanted)
    assert np.isfinite(found).all()
    assert (found == wanted).all()


def test_with_avx_vnni_a_panel_loads_an_activation_for_32_outputs() -> None:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    triple = "x86_64-unknown-linux-gnu"
    module = ir.Module()
    module.triple = triple
    kind = ir.FunctionType(ir.VoidType(), [emit.I64] * (2 + _OPERANDS))
    b = ir.IRBuilder(ir.Function(module, kind, "f").append_basic_block())
    tokens, unpacked, *operands = b.function.args
    panel.emit_panel(b, 4, 1, tokens, unpacked, tile.Operands(*operands), {"avx2", "avxvnni"})
    b.ret_void()
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu="alderlake", opt=2)
    text = machine.emit_assembly(llvm.parse_assembly(str(module)))
    products = text.count("vpdpbusd")
    loaded = len(re.findall(r"vpbroadcastd\t-?\d*\(%r(?!ip)", text))
    assert products == 2 * 8 * 8  # of a group's first run and of others: 8 sums, 8 times 4 bytes
    assert loaded < products // 3  # and scales and sums of tokens
