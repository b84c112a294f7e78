"""Codes of 2 and 3 bits as codes of 4, which is what attention computes with, and back.

Their rows lie one behind the other (`layout.kv_format`), so that a quarter of a block's tokens is
one run of bytes, and its codes are a shift and a mask away.
"""

from __future__ import annotations

from numba import types

from qoff.kernels.cpu.jit.emit import (
    V_I32,
    const_i32,
    const_i64,
    load,
    loop,
    prefetch,
    store,
)
from qoff.kernels.cpu.jit.simd import vector_intrinsic

_TWO, _ONE, _UPPER = 0x33333333, 0x11111111, 0x44444444
_i64 = types.int64


def _shifted(b, x, left):
    return b.shl(x, const_i32(left)) if left > 0 else b.lshr(x, const_i32(-left))


def _places(b, start, quarter, count):
    """A vector's place in each of the first `count` quarters."""
    return [b.add(start, b.mul(quarter, const_i64(i))) for i in range(count)]


@vector_intrinsic(types.void, *[_i64] * 5)
def to_nibbles(b, codes, quarter, bits, ahead, to):
    """Write codes of 2 or 3 bits as uint8 [4 * quarter] of 4 bits; `quarter`: a multiple of 64.

    ahead: bytes to the codes that are read next, which are asked for.
    """
    turn, _, close = loop(b, b.lshr(quarter, const_i64(6)), [])
    here = b.add(codes, b.shl(turn, const_i64(6)))
    target = b.add(to, b.shl(turn, const_i64(6)))
    first, second, upper = _places(b, here, quarter, 3)
    targets = _places(b, target, quarter, 4)
    for source in (first, second):
        prefetch(b, b.add(source, ahead), 0)
    rows = [load(b, source, 0, V_I32) for source in (first, second)]
    rows += [b.lshr(row, const_i32(2)) for row in rows]
    rows = [b.and_(row, const_i32(_TWO)) for row in rows]
    for row, place in zip(rows, targets, strict=True):
        store(b, row, place, 0)
    with b.if_then(b.icmp_signed("==", bits, const_i64(3))):
        prefetch(b, b.add(upper, ahead), 0)
        plane = load(b, upper, 0, V_I32)
        for i, (row, place) in enumerate(zip(rows, targets, strict=True)):
            bit = b.and_(_shifted(b, plane, 2 - i), const_i32(_UPPER))
            store(b, b.or_(row, bit), place, 0)
    close([])


@vector_intrinsic(types.void, *[_i64] * 4)
def from_nibbles(b, nibbles, quarter, bits, to):
    """Undo `to_nibbles`."""
    turn, _, close = loop(b, b.lshr(quarter, const_i64(6)), [])
    here = b.add(nibbles, b.shl(turn, const_i64(6)))
    first, second, upper = _places(b, b.add(to, b.shl(turn, const_i64(6))), quarter, 3)
    rows = [load(b, place, 0, V_I32) for place in _places(b, here, quarter, 4)]
    lower = [b.and_(row, const_i32(_TWO)) for row in rows]
    for i, place in enumerate((first, second)):
        store(b, b.or_(lower[i], b.shl(lower[2 + i], const_i32(2))), place, 0)
    with b.if_then(b.icmp_signed("==", bits, const_i64(3))):
        plane = const_i32(0)
        for i, row in enumerate(rows):
            bit = b.and_(b.lshr(row, const_i32(2)), const_i32(_ONE))
            plane = b.or_(plane, b.shl(bit, const_i32(i)))
        store(b, plane, upper, 0)
    close([])
