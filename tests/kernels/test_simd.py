"""The vector instructions against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from llvmlite import ir
from numba import njit, types

from qoff.kernels.cpu.jit import emit, powers, simd
from qoff.kernels.cpu.jit.quads import of_row, quads


@njit
def _exp(x, y):
    for i in range(0, 4 * len(x), 64):
        simd.store_f32(y.ctypes.data + i, simd.exp(simd.load_f32(x.ctypes.data + i)))


@njit
def _reductions(x):
    v = simd.load_f32(x.ctypes.data)
    return simd.sum_f32(v), simd.max_f32(v), simd.max_f32(simd.absolute(v))


_VARIANTS = [
    {"avx512vnni"} & emit.host_features(),
    {"avx512bw"} & emit.host_features(),
    {"avx2"} & emit.host_features(),
    set(),
]


@pytest.mark.parametrize("features", _VARIANTS, ids=lambda f: next(iter(f), "plain"))
@pytest.mark.parametrize(("u8_bits", "s8_bits"), [(8, 7), (6, 7), (4, 7), (8, 4)])
def test_byte_dot_is_exact_on_every_processor(
    features: set[str], u8_bits: int, s8_bits: int
) -> None:
    i64 = types.int64

    @simd.vector_intrinsic(types.void, i64, i64, i64)
    def accumulate(b, acc, u8, s8):
        vectors = (emit.load(b, address, 0, emit.V_I32) for address in (acc, u8, s8))
        result = emit.dot_u8s8(b, *vectors, (u8_bits, s8_bits), features)
        b.store(result, emit.at(b, acc, 0, emit.V_I32), align=1)

    @njit
    def run(acc, u8, s8):
        accumulate(acc.ctypes.data, u8.ctypes.data, s8.ctypes.data)

    random = np.random.default_rng(0)
    acc = random.integers(-(2**20), 2**20, 16).astype(np.int32)
    most, least = 2**u8_bits - 1, -(2**s8_bits)
    u8 = random.integers(0, most + 1, (16, 4)).astype(np.uint8)
    s8 = random.integers(least, -least, (16, 4)).astype(np.int8)
    u8[0], s8[0] = most, least
    u8[1], s8[1] = most, -least - 1
    expected = acc + (u8.astype(np.int32) * s8.astype(np.int32)).sum(1)
    run(acc, u8, s8)
    assert (acc == expected).all()


def test_exp() -> None:
    x = np.linspace(-87, 88, 16 * 4000, dtype=np.float32)
    y = np.full_like(x, np.nan)
    _exp(x, y)
    np.testing.assert_allclose(y, np.exp(x.astype(np.float64)), rtol=3e-7)


def test_exp_at_its_ends() -> None:
    x = np.array([-np.inf, -1e30, -88, 0, 88.3, 200, np.nan, -100] * 2, dtype=np.float32)
    y = np.full_like(x, np.nan)
    _exp(x, y)
    assert (y[[0, 1, 2, 7]] == 0).all()
    assert y[3] == 1
    assert (np.isfinite(y) == ~np.isnan(x)).all()


@pytest.mark.parametrize("seed", range(5))
def test_reductions(seed: int) -> None:
    x = np.random.default_rng(seed).standard_normal(16).astype(np.float32)
    total, largest, largest_absolute = _reductions(x)
    assert total == pytest.approx(x.sum(dtype=np.float64), abs=1e-5)
    assert largest == x.max()
    assert largest_absolute == np.abs(x).max()


@simd.vector_intrinsic(simd.f32x16, simd.f32x16)
def _exp2(b, x):
    return powers.exp2(b, x)


@simd.vector_intrinsic(simd.f32x16, simd.f32x16)
def _log2(b, x):
    return powers.log2(b, x)


@njit
def _exact_logarithms(x, y):
    for i in range(0, 4 * len(x), 64):
        simd.store_f32(y.ctypes.data + i, _log2(simd.load_f32(x.ctypes.data + i)))


@njit
def _powers(x, y):
    for i in range(0, 4 * len(x), 64):
        simd.store_f32(y.ctypes.data + i, _exp2(simd.load_f32(x.ctypes.data + i)))


@njit
def _logarithms(x, y):
    for i in range(0, 4 * len(x), 64):
        simd.store_f32(y.ctypes.data + i, powers.log2_above(simd.load_f32(x.ctypes.data + i)))


def test_powers_of_two() -> None:
    x = np.linspace(-126, 127, 16 * 4000, dtype=np.float32)
    y = np.full_like(x, np.nan)
    _powers(x, y)
    np.testing.assert_allclose(y, np.exp2(x.astype(np.float64)), rtol=3e-7)


def test_powers_of_two_of_numbers_that_are_none() -> None:
    x = np.array([-np.inf, -3e38, -1e30, -126.1, np.nan, 0, 1, -126] * 2, dtype=np.float32)
    y = np.full_like(x, 7)
    _powers(x, y)
    assert (y[:4] == 0).all()
    assert np.isnan(y[4])
    poison = np.full(16, -1, dtype=np.int32).view(np.float32)
    _powers(poison, y)
    assert np.isnan(y).all()
    _powers(x, y)
    np.testing.assert_allclose(y[5:8], [1, 2, 2.0**-126], rtol=3e-7)


def test_logarithms() -> None:
    near = 1 + np.linspace(-0.5, 1, 16 * 2000)
    x = np.concatenate((np.geomspace(1.2e-38, 3e38, 16 * 2000), near)).astype(np.float32)
    y = np.full_like(x, np.nan)
    _exact_logarithms(x, y)
    exact = np.log2(x.astype(np.float64))
    np.testing.assert_allclose(y, exact, rtol=1e-7, atol=1e-6)


def test_logarithms_are_not_underestimated() -> None:
    x = np.geomspace(6e-8, 65504, 16 * 4000).astype(np.float32)
    y = np.full_like(x, np.nan)
    _logarithms(x, y)
    over = y - np.log2(x.astype(np.float64))
    assert over.min() > -2e-6  # what float32 makes of it
    assert over.max() < 0.09
    zero = np.zeros(16, dtype=np.float32)
    _logarithms(zero, y[:16])
    assert (y[:16] < -126).all()


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_quads_combine_each_vector_alone(rows: int) -> None:
    i64 = types.int64

    @simd.vector_intrinsic(types.void, i64, i64)
    def combine(b, x, out):
        vectors = [emit.load(b, x, 64 * row, emit.V_F32) for row in range(rows)]
        for place, how in enumerate((b.fadd, lambda p, q: emit.maximum(b, p, q))):
            emit.store(b, quads(b, vectors, how), out, 64 * place)
        emit.store(b, of_row(b, quads(b, vectors, b.fadd), rows - 1), out, 128)

    @njit
    def run(x, out):
        combine(x.ctypes.data, out.ctypes.data)

    x = np.random.default_rng(rows).standard_normal((4, 16)).astype(np.float32)
    x[rows:] = np.nan  # never read
    out = np.full((3, 16), np.nan, dtype=np.float32)
    run(x, out)
    for row in range(rows):
        np.testing.assert_allclose(out[0, 4 * row : 4 * row + 4], x[row].sum(), rtol=1e-5)
        assert (out[1, 4 * row : 4 * row + 4] == x[row].max()).all()
    assert (out[2] == out[0, 4 * rows - 1]).all()


@pytest.mark.skipif("avx2" not in emit.host_features(), reason="needs AVX2")
@pytest.mark.parametrize(("u8_bits", "weight"), [(8, 1), (6, 256), (4, 256)])
@pytest.mark.parametrize("extreme", ["most", "least"])
def test_products_added_as_words_do_not_overflow(u8_bits: int, weight: int, extreme: str) -> None:
    i64, count, width = types.int64, 12, 8
    kind = ir.VectorType(emit.I32, width)

    @simd.vector_intrinsic(types.void, i64, i64, i64)
    def accumulate(b, acc, u8, s8):
        factors = [[emit.load(b, x, 32 * i, kind) for x in (u8, s8)] for i in range(count)]
        before = emit.load(b, acc, 0, kind)
        result = emit.dots(b, before, factors, (u8_bits, 7), weight, {"avx2"})
        b.store(result, emit.at(b, acc, 0, kind), align=1)

    @njit
    def run(acc, u8, s8):
        accumulate(acc.ctypes.data, u8.ctypes.data, s8.ctypes.data)

    acc = np.arange(width, dtype=np.int32)
    u8 = np.full((count, width, 4), 2**u8_bits - 1, np.uint8)
    s8 = np.full((count, width, 4), 127 if extreme == "most" else -128, np.int8)
    s8[:, 0] = np.arange(4 * count).reshape(count, 4)  # not all lanes alike
    expected = acc + weight * (u8.astype(np.int32) * s8).sum((0, 2))
    run(acc, u8, s8)
    assert (acc == expected).all()
