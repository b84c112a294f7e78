"""Vector code for one block of the packed KV cache: scores of queries, and values weighed by them.

The dot product of bytes sums four neighbouring bytes in each of 16 lanes. Keys are summed over
channels, so 16 tokens by 16 words of codes are transposed in registers: a vector then holds four
channels of 16 tokens. Values are summed over tokens, so the bytes of four tokens are interleaved: a
vector then holds four tokens of 16 channels. Nothing unpacked is ever written to memory.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types

from .emit import (
    I8,
    I32,
    I64,
    V_F32,
    V_I32,
    at,
    const_i32,
    dot_u8s8,
    load,
    loop,
    prefetch,
    splat,
)
from .simd import vector_intrinsic

ROWS = 4  # queries at a time: their sums and 16 words of keys fill the registers
BYTES = ir.VectorType(I8, 64)
V_HALF = ir.VectorType(I32, 8)
_LOW = 0x0F0F0F0F
_i64 = types.int64

# How the codes of a token lie in a record.
NIBBLES = 0  # 4 bits, a plane of 64 channels in 64 bytes; the planes one above the other
NARROW = 1  # 4 bits, head size 64: both planes in 32 bytes
WHOLE = 2  # 8 bits


def channel_order() -> list[int]:
    """Channel, within a chunk of 64, of each of the 64 lanes that values are summed in."""
    return [
        16 * lane + 4 * vector + i for vector in range(4) for lane in range(4) for i in range(4)
    ]


def _const(value):
    return ir.Constant(I64, value)


def _transpose_words(b, rows):
    """Transpose 16 vectors of 16 words by four butterflies."""
    for step in (8, 4, 2, 1):
        for i in range(16):
            if i & step:
                continue
            first, second = rows[i], rows[i | step]
            keep = [lane if not lane & step else 16 + (lane ^ step) for lane in range(16)]
            swap = [(lane | step) if not lane & step else 16 + lane for lane in range(16)]
            for target, mask in ((i, keep), (i | step, swap)):
                constant = ir.Constant(ir.VectorType(I32, 16), mask)
                rows[target] = b.shuffle_vector(first, second, constant)
    return rows


def _low_nibbles(b, words):
    return b.and_(words, const_i32(_LOW))


def _high_nibbles(b, words):
    return b.and_(b.lshr(words, const_i32(4)), const_i32(_LOW))


def _load_rows(b, codes, stride, count, ahead):
    rows = []
    for i in range(count):
        address = b.add(codes, b.mul(stride, _const(i)))
        prefetch(b, b.add(address, ahead), 0)
        rows.append(load(b, address, 0, V_I32))
    return rows


class _Query:
    """The int8 planes of a few queries: [row, plane, channels], `plane` bytes a plane."""

    def __init__(self, b, address, rows, plane):
        self._b = b
        self._rows = [
            [b.add(address, b.mul(plane, _const(2 * row + high_low))) for high_low in range(2)]
            for row in range(rows)
        ]

    def dot(self, sums, codes, offset):
        """Add four channels, `offset` bytes into the planes, to sums[row][plane]."""
        b = self._b
        for row, planes in enumerate(self._rows):
            for plane, address in enumerate(planes):
                x = splat(b, load(b, b.add(address, offset), 0, I32), V_I32)
                sums[row][plane] = dot_u8s8(b, sums[row][plane], codes, x)

    def zeros(self):
        return [[const_i32(0), const_i32(0)] for _ in self._rows]


def _exact(b, planes):
    """256 * high + low, as float32."""
    high, low = planes
    return b.sitofp(b.add(b.shl(high, const_i32(8)), low), V_F32)


def _emit_narrow_scores(b, rows, codes, ahead, query, plane, out, out_stride):
    """32 tokens of head size 64: a vector of codes holds an even token, then an odd one."""
    columns = _transpose_words(b, _load_rows(b, codes, _const(64), 16, ahead))
    q = _Query(b, query, rows, plane)
    found = []
    for first in (0, 8):
        sums = q.zeros()
        for word in range(8):
            column = columns[first + word]
            q.dot(sums, _low_nibbles(b, column), _const(4 * word))
            q.dot(sums, _high_nibbles(b, column), _const(32 + 4 * word))
        found.append([_exact(b, planes) for planes in sums])
    for row, (even, odd) in enumerate(zip(*found, strict=True)):
        to = b.add(out, b.mul(out_stride, _const(row)))
        for half in range(2):
            mask = [8 * half + i // 2 + 16 * (i % 2) for i in range(16)]
            both = b.shuffle_vector(even, odd, ir.Constant(ir.VectorType(I32, 16), mask))
            b.store(both, at(b, to, 64 * half, V_F32), align=1)


def _emit_scores(b, kind, rows, codes, stride, ahead, chunks, query, plane, out, out_stride):
    """16 tokens, a chunk of 64 bytes of their codes at a time."""
    flat = [const_i32(0)] * (2 * rows)
    chunk, flat, close = loop(b, chunks, flat)
    sums = [list(flat[2 * row : 2 * row + 2]) for row in range(rows)]
    start = b.mul(chunk, _const(64))
    columns = _transpose_words(b, _load_rows(b, b.add(codes, start), stride, 16, ahead))
    q = _Query(b, query, rows, plane)
    high_plane = b.add(start, b.mul(chunks, _const(64)))
    for word, column in enumerate(columns):
        at_word = _const(4 * word)
        if kind == WHOLE:
            q.dot(sums, column, b.add(start, at_word))
        else:
            q.dot(sums, _low_nibbles(b, column), b.add(start, at_word))
            q.dot(sums, _high_nibbles(b, column), b.add(high_plane, at_word))
    flat = close([value for planes in sums for value in planes])
    for row in range(rows):
        to = b.add(out, b.mul(out_stride, _const(row)))
        b.store(_exact(b, flat[2 * row : 2 * row + 2]), at(b, to, 0, V_F32), align=1)


def _unpacked(b, first, second, width, high):
    """Elements of `width` bytes of two vectors in turn, from half of each 16 bytes."""
    mask = []
    for lane in range(4):
        start = 16 * lane + (8 if high else 0)
        for element in range(0, 8, width):
            mask += [start + element + i for i in range(width)]
            mask += [64 + start + element + i for i in range(width)]
    constant = ir.Constant(ir.VectorType(I32, 64), mask)
    return b.shuffle_vector(first, second, constant)


def _interleave_tokens(b, rows):
    """Four vectors of 64 channels of a token each: four vectors of 16 channels of 4 tokens."""
    first, second, third, fourth = (b.bitcast(row, BYTES) for row in rows)
    out = []
    for high in (False, True):
        two, other_two = _unpacked(b, first, second, 1, high), _unpacked(b, third, fourth, 1, high)
        out += [_unpacked(b, two, other_two, 2, half) for half in (False, True)]
    return [b.bitcast(vector, V_I32) for vector in out]


def _load_values(b, kind, codes, stride, ahead, upper):
    """Four tokens' codes of one chunk of 64 channels, as signed bytes."""
    if kind == NARROW:
        prefetch(b, b.add(codes, ahead), 0)
        prefetch(b, b.add(codes, ahead), 64)
        rows = []
        for i in range(4):
            words = load(b, codes, 32 * i, V_HALF)
            shifted = b.lshr(words, ir.Constant(V_HALF, [4] * 8))
            mask = ir.Constant(ir.VectorType(I32, 16), list(range(16)))
            rows.append(_low_nibbles(b, b.shuffle_vector(words, shifted, mask)))
        return rows
    rows = _load_rows(b, codes, stride, 4, ahead)
    if kind == WHOLE:
        flip = const_i32(-0x7F7F7F80)  # 0x80808080: code - 128
        return [b.xor(row, flip) for row in rows]
    return [(_high_nibbles if upper else _low_nibbles)(b, row) for row in rows]


def _emit_weigh(b, kind, upper, rows, codes, stride, ahead, weights, weight_stride, out):
    """All 64 tokens of one chunk of channels."""
    flat = [const_i32(0)] * (4 * rows)
    quad, flat, close = loop(b, _const(16), flat)
    sums = list(flat)
    here = b.add(codes, b.mul(b.mul(stride, _const(4)), quad))
    values = _interleave_tokens(b, _load_values(b, kind, here, stride, ahead, upper))
    for row in range(rows):
        address = b.add(b.add(weights, b.mul(quad, _const(4))), b.mul(weight_stride, _const(row)))
        p = splat(b, load(b, address, 0, I32), V_I32)
        for v, value in enumerate(values):
            sums[4 * row + v] = dot_u8s8(b, sums[4 * row + v], p, value)
    for i, total in enumerate(close(sums)):
        b.store(b.sitofp(total, V_F32), at(b, out, 64 * i, V_F32), align=1)


def _switch(b, number, cases):
    """Run the one of `cases` (number -> function) that `number` says."""
    after = b.append_basic_block("switch_done")
    choice = b.switch(number, after)
    for case, emit in cases.items():
        block = b.append_basic_block("case")
        choice.add_case(_const(case), block)
        b.position_at_end(block)
        emit()
        b.branch(after)
    b.position_at_end(after)


def _each_row_count(emit):
    return {rows: lambda rows=rows: emit(rows) for rows in range(1, ROWS + 1)}


@vector_intrinsic(types.void, *[_i64] * 10)
def block_scores(b, kind, rows, codes, stride, ahead, chunks, query, plane, out, out_stride):
    """out[row, tokens] = sum over channels of code * (256 * high + low), as float32.

    16 tokens (32 if NARROW) of `rows` queries, 1 to ROWS. codes: of the first token; the next is
    `stride` bytes on, `chunks` times 64 bytes of it are read; `ahead`: bytes to what is needed
    next from memory. query: int8 [rows, 2, plane], the high and the low plane, channels in the
    order of the codes, zero where a chunk has none.
    """
    narrow = lambda n: _emit_narrow_scores(b, n, codes, ahead, query, plane, out, out_stride)  # noqa: E731

    def wide(case):
        return lambda n: _emit_scores(
            b, case, n, codes, stride, ahead, chunks, query, plane, out, out_stride
        )

    emitters = {NIBBLES: wide(NIBBLES), NARROW: narrow, WHOLE: wide(WHOLE)}
    _switch(
        b,
        kind,
        {
            case: lambda emit=emit: _switch(b, rows, _each_row_count(emit))
            for case, emit in emitters.items()
        },
    )


@vector_intrinsic(types.void, *[_i64] * 9)
def block_weigh(b, kind, upper, rows, codes, stride, ahead, weights, weight_stride, out):
    """out[row, 64 lanes] = sum over 64 tokens of weight * code, as float32.

    One chunk of 64 channels, in `channel_order`; codes of the first token as for `block_scores`;
    upper: 1 for the high nibbles. Codes of 8 bits count as code - 128. weights: uint8 [rows, 64].
    """
    args = (codes, stride, ahead, weights, weight_stride, out)
    cases = {
        NIBBLES: lambda: _switch(
            b,
            upper,
            {
                which: lambda which=which: _switch(
                    b,
                    rows,
                    _each_row_count(lambda n: _emit_weigh(b, NIBBLES, which, n, *args)),
                )
                for which in (0, 1)
            },
        ),
        NARROW: lambda: _switch(
            b, rows, _each_row_count(lambda n: _emit_weigh(b, NARROW, 0, n, *args))
        ),
        WHOLE: lambda: _switch(
            b, rows, _each_row_count(lambda n: _emit_weigh(b, WHOLE, 0, n, *args))
        ),
    }
    _switch(b, kind, cases)
