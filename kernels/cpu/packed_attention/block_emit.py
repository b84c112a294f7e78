"""Vector code for one block of the packed KV cache: scores of queries, and values weighed by them.

The dot product of bytes sums four neighbouring bytes in each of 16 lanes. Keys are summed over
channels, so 16 tokens by 16 words of codes are transposed in registers: a vector then holds four
channels of 16 tokens. Values are summed over tokens, so the bytes of four tokens are interleaved: a
vector then holds four tokens of 16 channels. Nothing unpacked is ever written to memory.
"""

from __future__ import annotations

from functools import partial
from itertools import islice

from llvmlite import ir
from numba import types

from qoff.kernels.cpu.jit.emit import (
    F32,
    I8,
    I32,
    LANES,
    V_F32,
    V_I32,
    adds_words,
    at,
    const_f32,
    const_i32,
    const_i64,
    dot_u8s8,
    dots,
    fma,
    joined,
    lanes,
    load,
    loop,
    prefetch,
    register_lanes,
    splat,
    switch,
)
from qoff.kernels.cpu.jit.simd import vector_intrinsic

from .scratch import TOGETHER, TOKENS

ROWS = TOGETHER  # queries at a time
BYTES = ir.VectorType(I8, 64)
_LOW = 0x0F0F0F0F
_TOGETHER = 8  # steps whose products are added up as words
_i64 = types.int64

# How the codes of a token lie in a record.
NIBBLES = 0  # 4 bits, a plane of 64 channels in 64 bytes; the planes one above the other
NARROW = 1  # 4 bits, head size 64: both planes in 32 bytes
WHOLE = 2  # 8 bits


def _transpose_words(b, rows):
    """Transpose 16 vectors of 16 words by butterflies; of 8 vectors, both halves of 8 words."""
    for step in (8, 4, 2, 1):
        for i in range(len(rows)):
            if step == len(rows) or i & step:
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
        address = b.add(codes, b.mul(stride, const_i64(i)))
        prefetch(b, b.add(address, ahead), 0)
        rows.append(load(b, address, 0, V_I32))
    return rows


class _Query:
    """The int8 planes of a few queries: [row, plane, channels], `plane` bytes a plane."""

    def __init__(self, b, address, rows, plane):
        self._b = b
        self._planes = [b.add(address, b.mul(plane, const_i64(i))) for i in range(2 * rows)]

    def dot(self, sums, bits, steps):
        """Add four channels a step: codes of `bits` bits, and where their channels lie in a plane.

        sums: what steps in turn are added to.
        """
        b, together = self._b, _TOGETHER if adds_words() else 1
        for turn, batch in enumerate(_batches(steps, together)):
            mine = sums[turn % len(sums)]
            if together > 1:
                self._add_by_register(mine, bits, batch)
                continue
            ((codes, offset),) = batch
            for i, address in enumerate(self._planes):
                x = splat(b, load(b, b.add(address, offset), 0, I32), V_I32)
                mine[i] = dot_u8s8(b, mine[i], codes, x, (bits, 7))

    def _add_by_register(self, sums, bits, steps):
        """As many rows' sums at a time as a register has, so that codes stay in registers."""
        b, width = self._b, register_lanes()
        kind = ir.VectorType(I32, width)
        parts: list[list[ir.Value]] = []
        for start in range(0, LANES, width):
            codes = [lanes(b, code, code, start, width) for code, _ in steps]
            parts.append(part := [])
            for total, address in zip(sums, self._planes, strict=True):
                xs = [splat(b, load(b, b.add(address, at), 0, I32), kind) for _, at in steps]
                before = lanes(b, total, total, start, width)
                factors = list(zip(codes, xs, strict=True))
                part.append(dots(b, before, factors, (bits, 7)))
        sums[:] = [joined(b, x) for x in zip(*parts, strict=True)]


def _batches(steps, size):
    steps = iter(steps)
    while batch := list(islice(steps, size)):
        yield batch


def _zero_sums(rows):
    """Sums of [row, plane]; two of each where so few would wait for each other."""
    return [[const_i32(0)] * (2 * rows) for _ in range(2 if rows <= 2 else 1)]


def _exact(b, sums, row):
    """256 * high + low, rounded once to float32: of more than 256 channels it may pass 2**31."""
    high, low = (_total(b, [one[2 * row + plane] for one in sums]) for plane in (0, 1))
    return fma(b, high, const_f32(256.0), low)


def _total(b, vectors):
    return b.sitofp(vectors[0] if len(vectors) == 1 else b.add(*vectors), V_F32)


def _emit_narrow_scores(b, rows, codes, ahead, query, plane, out, out_stride):
    """16 tokens of head size 64: a vector of codes holds an even token, then an odd one."""
    columns = _transpose_words(b, _load_rows(b, codes, const_i64(64), 8, ahead))
    q, sums = _Query(b, query, rows, plane), _zero_sums(rows)

    def steps():
        for word, column in enumerate(columns):
            yield _low_nibbles(b, column), const_i64(4 * word)
            yield _high_nibbles(b, column), const_i64(32 + 4 * word)

    q.dot(sums, 4, steps())
    mask = ir.Constant(ir.VectorType(I32, 16), [i // 2 + 8 * (i % 2) for i in range(16)])
    for row in range(rows):
        found = _exact(b, sums, row)
        to = b.add(out, b.mul(out_stride, const_i64(row)))
        b.store(b.shuffle_vector(found, found, mask), at(b, to, 0, V_F32), align=1)


def _emit_scores(b, kind, rows, codes, stride, ahead, chunks, query, plane, out, out_stride):
    """16 tokens, a chunk of 64 bytes of their codes at a time."""
    sums = _zero_sums(rows)
    chunk, flat, close = loop(b, chunks, [value for one in sums for value in one])
    sums = [flat[i : i + 2 * rows] for i in range(0, len(flat), 2 * rows)]
    start = b.mul(chunk, const_i64(64))
    columns = _transpose_words(b, _load_rows(b, b.add(codes, start), stride, 16, ahead))
    q = _Query(b, query, rows, plane)
    high_plane = b.add(start, b.mul(chunks, const_i64(64)))

    def steps():
        for word, column in enumerate(columns):
            at_word = const_i64(4 * word)
            if kind == WHOLE:
                yield column, b.add(start, at_word)
            else:
                yield _low_nibbles(b, column), b.add(start, at_word)
                yield _high_nibbles(b, column), b.add(high_plane, at_word)

    q.dot(sums, 8 if kind == WHOLE else 4, steps())
    close([value for one in sums for value in one])
    for row in range(rows):
        to = b.add(out, b.mul(out_stride, const_i64(row)))
        b.store(_exact(b, sums, row), at(b, to, 0, V_F32), align=1)


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


def _narrow_values(b, codes, ahead):
    """Head size 64: four vectors of 16 channels of 4 tokens, two of which are 64 bytes of codes."""
    pairs = _load_rows(b, codes, const_i64(64), 2, ahead)
    out = []
    for nibbles in (_low_nibbles, _high_nibbles):
        first, second = (b.bitcast(nibbles(b, pair), BYTES) for pair in pairs)
        for start in (0, 16):
            mask = [32 * token + start + i for i in range(16) for token in range(4)]
            constant = ir.Constant(ir.VectorType(I32, 64), mask)
            out.append(b.bitcast(b.shuffle_vector(first, second, constant), V_I32))
    return out


def _values(b, kind, codes, stride, ahead, upper):
    """Four tokens of one chunk of 64 channels: four vectors of 16 channels, as signed bytes."""
    if kind == NARROW:
        return _narrow_values(b, codes, ahead)
    # Asked for once more with the upper channels: some of the first requests go unheard.
    rows = _load_rows(b, codes, stride, 4, ahead)
    if kind == WHOLE:
        flip = const_i32(-0x7F7F7F80)  # 0x80808080: code - 128
        return _interleave_tokens(b, [b.xor(row, flip) for row in rows])
    return _interleave_tokens(b, [(_high_nibbles if upper else _low_nibbles)(b, x) for x in rows])


def _emit_weigh(b, kind, upper, rows, codes, stride, ahead, weights, factors, out, out_stride,
                channels=()):  # fmt: skip
    """All 64 tokens of one chunk of channels.

    channels: of these, addresses of what the sum is multiplied by, and of what is added as often as
    the fourth factor says.
    """
    flat = [const_i32(0)] * (4 * rows)
    quad, flat, close = loop(b, const_i64(16), flat)
    sums = list(flat)
    bits = (8, 7 if kind == WHOLE else 4)
    here = b.add(codes, b.mul(b.mul(stride, const_i64(4)), quad))
    values = _values(b, kind, here, stride, ahead, upper)
    for row in range(rows):
        address = b.add(weights, b.add(b.mul(quad, const_i64(4)), const_i64(TOKENS * row)))
        p = splat(b, load(b, address, 0, I32), V_I32)
        for v, value in enumerate(values):
            sums[4 * row + v] = dot_u8s8(b, sums[4 * row + v], p, value, bits)
    close(sums)
    for row in range(rows):
        correction, step, shift, *total = (
            splat(b, load(b, address, 16 * row, F32), V_F32) for address in factors
        )
        to = b.add(out, b.mul(out_stride, const_i64(row)))
        for v in range(4):
            weighed = fma(b, b.sitofp(sums[4 * row + v], V_F32), step, shift)
            if channels:
                scale, minimum = (load(b, address, 64 * v, V_F32) for address in channels)
                weighed = fma(b, weighed, scale, b.fmul(minimum, *total))
            value = fma(b, load(b, to, 64 * v, V_F32), correction, weighed)
            b.store(value, at(b, to, 64 * v, V_F32), align=1)


def by_rows(b, rows, emit):
    """Emit `emit` for each number of rows, and a choice among them."""
    switch(b, rows, {n: partial(emit, n) for n in range(1, ROWS + 1)})


@vector_intrinsic(types.void, *[_i64] * 10)
def block_scores(b, kind, rows, codes, stride, ahead, chunks, query, plane, out, out_stride):
    """out[row, tokens] = sum over channels of code * (256 * high + low), as float32.

    16 tokens of `rows` queries, 1 to ROWS. codes: of the first token; the next is `stride` bytes
    on, `chunks` times 64 bytes of it are read; `ahead`: bytes to what is needed next from memory.
    query: int8 [rows, 2, plane], the high and the low plane, channels in the
    order of the codes, zero where a chunk has none.
    """
    where = (query, plane, out, out_stride)

    def wide(case, n):
        _emit_scores(b, case, n, codes, stride, ahead, chunks, *where)

    def narrow(n):
        _emit_narrow_scores(b, n, codes, ahead, *where)

    emitters = {NIBBLES: partial(wide, NIBBLES), NARROW: narrow, WHOLE: partial(wide, WHOLE)}
    switch(b, kind, {case: partial(by_rows, b, rows, emit) for case, emit in emitters.items()})


def _weigh_any(b, kind, upper, rows, *args):
    """`_emit_weigh` for each kind of codes and number of rows, and a choice among them."""

    def weigh(case, which):
        by_rows(b, rows, lambda n: _emit_weigh(b, case, which, n, *args))

    planes = {which: partial(weigh, NIBBLES, which) for which in (0, 1)}
    cases = {
        NIBBLES: partial(switch, b, upper, planes),
        NARROW: partial(weigh, NARROW, 0),
        WHOLE: partial(weigh, WHOLE, 0),
    }
    switch(b, kind, cases)


@vector_intrinsic(types.void, *[_i64] * 12)
def block_weigh(
    b, kind, upper, rows, codes, stride, ahead, weights, correction, step, shift, out, out_stride
):
    """out[row, 64 lanes] = out * correction + step * sum over 64 tokens of weight * code + shift.

    One chunk of 64 channels, in the lanes that `block.lane_of` says. Codes of the first
    token as for `block_scores`; upper: 1 for the high nibbles. Codes of 8 bits count as code - 128.
    weights: uint8 [rows, 64].
    correction, step, shift: float32 [rows, 4], of which the first is taken. out: float32, rows
    `out_stride` bytes apart.
    """
    args = (codes, stride, ahead, weights, (correction, step, shift), out, out_stride)
    _weigh_any(b, kind, upper, rows, *args)


@vector_intrinsic(types.void, *[_i64] * 14)
def block_weigh_latent(b, kind, upper, rows, codes, stride, weights, correction, step, shift, total,
                       scale, minimum, out, out_stride):  # fmt: skip
    """out = out * correction + scale * (step * sum of weight * code + shift) + minimum * total.

    As `block_weigh`; codes are those that were read before. scale, minimum: float32 [64], of the
    lanes of the chunk.
    """
    factors = (correction, step, shift, total)
    args = (codes, stride, const_i64(0), weights, factors, out, out_stride, (scale, minimum))
    _weigh_any(b, kind, upper, rows, *args)
