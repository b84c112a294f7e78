"""Keys, values and queries as pairs of bfloat16, which a dot product multiplies at once."""

from __future__ import annotations

from numba import types

from qoff.kernels.cpu.jit import simd
from qoff.kernels.cpu.jit.compiled import inner
from qoff.kernels.cpu.jit.emit import HAS_BF16, LANES, rounded_bf16, store
from qoff.kernels.cpu.jit.quads import shuffled
from qoff.kernels.cpu.jit.simd import vector_intrinsic

_PAIRS = [half + i for i in range(LANES) for half in (0, LANES)]


@vector_intrinsic(types.void, types.int64, simd.f32x16, simd.f32x16)
def _store_paired(b, address, first, second):
    """Store 16 pairs of one number of each vector."""
    if HAS_BF16:  # else nobody asks for it
        both = rounded_bf16(b, first, second)
        store(b, shuffled(b, both, both, _PAIRS), address, 0)


@vector_intrinsic(types.void, types.int64, simd.f32x16, simd.f32x16)
def _store_joined(b, address, first, second):
    """Store 16 numbers, then 16 others."""
    if HAS_BF16:
        store(b, rounded_bf16(b, first, second), address, 0)


@inner
def pair_keys(keys, vectors, dim, out):
    """Of vectors of 16 keys, [vectors, dim, 16] float32, make [vectors, dim / 2, 16, 2]."""
    for i in range(vectors * dim // 2):
        at = keys + 128 * i
        _store_paired(out + 64 * i, simd.load_f32(at), simd.load_f32(at + 64))


@inner
def pair_values(values, count, dim, out):
    """Of values, [count, dim] float32, make [ceil(count / 2), dim / 16, 16, 2], the last with 0."""
    row = 4 * dim
    for i in range(count // 2):
        for at in range(2 * row * i, 2 * row * i + row, 64):
            first = simd.load_f32(values + at)
            _store_paired(out + at - row * i, first, simd.load_f32(values + at + row))
    if count % 2:
        for at in range(0, row, 64):
            last = simd.load_f32(values + row * (count - 1) + at)
            _store_paired(out + row * (count // 2) + at, last, simd.splat_f32(0.0))


@inner
def round_query(query, dim, out):
    """Of a query, [dim] float32, make [dim] bfloat16; up to 32 bytes behind it are written, too."""
    for i in range(0, 4 * dim, 128):
        at = query + i
        second = simd.load_f32(at + 64) if i + 64 < 4 * dim else simd.splat_f32(0.0)
        _store_joined(out + i // 2, simd.load_f32(at), second)
