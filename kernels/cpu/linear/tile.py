"""The inner tile of the quantized matmul: weights against a few tokens, sums in registers.

A tile is `row_blocks` blocks of 16 outputs (one block = one vector, packing `rows16`) times
`tokens` tokens, over all of K. Activations come as two int8 planes, x = scale * (256 * high + low),
so 16-bit integers; codes are unsigned bytes. Both dot products are exact in int32, and only the sum
of a whole group is turned into float32 and scaled:

    y[n, m] = sum over groups g of  (codes . x)[n, m, g] * scale[n, g] * xscale[m, g]
                                    + minimum[n, g] * xsum[m, g]

The order of operations for one output does not depend on how many tokens or threads there are.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from llvmlite import ir
from numba import types

from qoff.kernels.cpu.jit.emit import (
    F32,
    FEATURES,
    I32,
    LANES,
    V_F32,
    V_I32,
    adds_words,
    const_f32,
    const_i32,
    const_i64,
    dot_u8s8,
    dots,
    fma,
    joined,
    load,
    loop,
    prefetch,
    register_lanes,
    splat,
    store,
)
from qoff.kernels.cpu.jit.simd import vector_intrinsic
from qoff.kernels.layout.packing import BITS, EACH_BYTE, reads

from .scales import ROW_BLOCK_BYTES, scale_and_minimum

VECTOR_BYTES = 64
UNROLL = 32  # elements of K handled by one pass of the inner loop: the smallest group
AHEAD_BYTES = 512  # of later codes that a tile of several tokens asks for in such a pass


@dataclass(frozen=True)
class Operands:
    """The tile's operands, all int64: addresses and strides in bytes."""

    codes: ir.Value  # first row block's codes
    codes_stride: ir.Value  # to the next row block
    scale_min: ir.Value  # first row block's scales and minima
    scale_min_stride: ir.Value
    width: ir.Value  # of a scale and of a minimum, see `scales.width_of`
    group_size: ir.Value
    groups: ir.Value
    high: ir.Value  # int8 [tokens, K]
    low: ir.Value  # int8 [tokens, K]
    token_stride: ir.Value  # K
    scales: ir.Value  # float32 [tokens, groups, 2]: xscale, xsum
    out: ir.Value  # float32 [row_blocks, tokens, 16]
    out_block_stride: ir.Value
    out_stride: ir.Value  # to the next token
    residual: ir.Value  # what is added, float32 like `out`, row blocks 64 bytes apart; 0: nothing
    residual_stride: ir.Value
    ahead: ir.Value  # codes that a later tile reads; 0: there are none


def codes_32(b, address, bits, kind=V_I32):
    """32 packed codes of 16 rows: (first of 4 elements of K, a vector of these, unsigned bytes).

    kind: of the vectors, of fewer rows perhaps: the first ones of `address`.
    """

    def filled(value):
        return ir.Constant(kind, [value] * kind.count)

    def masked(vector, shift, mask):
        shifted = b.lshr(vector, filled(shift)) if shift else vector
        return shifted if mask == 255 else b.and_(shifted, filled(mask * EACH_BYTE))

    quads: dict[int, ir.Value] = {}
    for step in range(bits):  # a word is done with before the next one takes a register
        vector = load(b, address, step * VECTOR_BYTES, kind)
        for i, parts in enumerate(reads(bits)):
            for word, right, mask in parts:
                if word == step:
                    part = masked(vector, right, mask)
                    quads[i] = b.or_(quads[i], part) if i in quads else part
            if max(word for word, _, _ in parts) == step:
                yield 4 * i, quads[i]


class _Sums:
    """Integer sums of a tile's outputs, each of a row block and a token: how a processor adds them.

    values: vectors of int32. By default there is one of 16 rows for each plane. Where that are more
    registers than there are, or sums of 16-bit words, there is one of both planes for each register
    of rows, to which 32 elements of K are added while the codes of these rows are in registers.
    """

    def __init__(self, bits, tokens, planes, features):
        self._bits, self._planes, self._features = bits, planes, features
        pays = tokens > 1 or adds_words(features)
        self._lanes = register_lanes(features) if pays else 0
        count = self._lanes or LANES
        self.kind = ir.VectorType(I32, count)
        self.zeros = [ir.Constant(self.kind, [0] * count)] * (
            LANES // count if self._lanes else planes
        )

    def add_32(self, b, codes, planes, values):
        """Add 32 elements of K to `values[row block][token]`.

        codes: addresses, by row block. planes: the activations' addresses, [plane][token].
        """
        if self._lanes:
            self._add_by_register(b, codes, planes, values)
            return
        steps = (codes_32(b, address, self._bits) for address in codes)
        for parts in zip(*steps, strict=True):
            for (k, part), by_token in zip(parts, values, strict=True):
                for plane, addresses in enumerate(planes):
                    for sums, at_token in zip(by_token, addresses, strict=True):
                        x = splat(b, load(b, at_token, k, I32), V_I32)
                        sums[plane] = dot_u8s8(
                            b, sums[plane], part, x, (self._bits, 7), self._features
                        )

    def _add_by_register(self, b, codes, planes, values):
        for row, address in enumerate(codes):
            for register in range(LANES // self._lanes):
                start = b.add(address, const_i64(4 * self._lanes * register))
                parts = list(codes_32(b, start, self._bits, self.kind))
                for token, sums in enumerate(values[row]):
                    for plane, addresses in enumerate(planes):
                        at_token = addresses[token]
                        pairs = [
                            (part, splat(b, load(b, at_token, k, I32), self.kind))
                            for k, part in parts
                        ]
                        weight = 256 if plane + 1 < self._planes else 1
                        sums[register] = dots(
                            b, sums[register], pairs, (self._bits, 7), weight, self._features
                        )

    def total(self, b, values):
        """What the sums of an output come to, 16 int32."""
        if self._lanes:
            return joined(b, values)
        return values[0] if len(values) == 1 else b.add(b.shl(values[0], const_i32(8)), values[1])


def emit_tile(b, bits, row_blocks, tokens, planes, o: Operands, features=FEATURES) -> None:
    """Emit the whole tile: loops over groups and, inside, over runs of 32 elements.

    planes: 2 for 16-bit activations, 1 for 8-bit ones, which are the high plane alone.
    """
    runs = b.sdiv(o.group_size, const_i64(UNROLL))
    run_bytes = UNROLL * 16 * bits // 8
    group_bytes = b.mul(runs, const_i64(run_bytes))
    scale_bytes = b.shl(const_i64(ROW_BLOCK_BYTES), o.width)
    pairs = [(r, t) for r in range(row_blocks) for t in range(tokens)]
    exact = _Sums(bits, tokens, planes, features)
    each = len(exact.zeros)

    group, sums, close_groups = loop(b, o.groups, [const_f32(0.0)] * len(pairs))
    codes_at = b.add(o.codes, b.mul(group, group_bytes))
    k_at = b.mul(group, o.group_size)

    run, integers, close_runs = loop(b, runs, exact.zeros * len(pairs))
    codes_at = b.add(codes_at, b.mul(run, const_i64(run_bytes)))
    k_at = b.add(k_at, b.mul(run, const_i64(UNROLL)))
    codes = [b.add(codes_at, b.mul(o.codes_stride, const_i64(r))) for r in range(row_blocks)]
    rows = [b.add(k_at, b.mul(o.token_stride, const_i64(t))) for t in range(tokens)]
    flat = iter(integers)
    accumulators = [
        [[next(flat) for _ in range(each)] for _ in range(tokens)] for _ in range(row_blocks)
    ]
    activations = [[b.add(plane, x) for x in rows] for plane in (o.high, o.low)[:planes]]
    passes = b.add(b.mul(group, runs), run)
    if tokens == 1:  # memory is what it waits for: all of the next tile's codes, in their order
        nbytes = row_blocks * run_bytes
        following = b.add(o.codes, b.mul(o.codes_stride, const_i64(row_blocks)))
        following = b.add(following, b.mul(passes, const_i64(nbytes)))
        for line in range(0, nbytes, VECTOR_BYTES):
            prefetch(b, following, line)
    else:
        with b.if_then(b.icmp_signed("!=", o.ahead, const_i64(0))):
            ahead = b.add(o.ahead, b.mul(passes, const_i64(AHEAD_BYTES)))
            for line in range(0, AHEAD_BYTES, VECTOR_BYTES):
                prefetch(b, ahead, line)
    exact.add_32(b, codes, activations, accumulators)
    integers = close_runs([value for row in accumulators for sums in row for value in sums])

    scale_at = b.add(o.scale_min, b.mul(group, scale_bytes))
    token_scales = [
        b.add(o.scales, b.mul(const_i64(8), b.add(group, b.mul(o.groups, const_i64(t)))))
        for t in range(tokens)
    ]
    totals: list[ir.Value] = []
    for row in range(row_blocks):
        address = b.add(scale_at, b.mul(o.scale_min_stride, const_i64(row)))
        if tokens == 1:
            prefetch(b, b.add(address, b.mul(o.scale_min_stride, const_i64(row_blocks))), 0)
        scale, minimum = scale_and_minimum(b, address, o.width, bits)
        for token in range(tokens):
            i = len(totals)
            product = exact.total(b, integers[each * i : each * (i + 1)])
            x_scale = splat(b, load(b, token_scales[token], 0, F32), V_F32)
            x_sum = splat(b, load(b, token_scales[token], 4, F32), V_F32)
            total = fma(b, b.sitofp(product, V_F32), b.fmul(scale, x_scale), sums[i])
            totals.append(fma(b, minimum, x_sum, total))
    totals = close_groups(totals)
    with b.if_else(b.icmp_signed("!=", o.residual, const_i64(0))) as (if_added, if_alone):
        with if_added:
            _write(b, pairs, totals, o, added=True)
        with if_alone:
            _write(b, pairs, totals, o, added=False)


def _write(b, pairs, totals, o: Operands, added: bool) -> None:
    for (row, token), total in zip(pairs, totals, strict=True):
        if added:
            plus = b.add(o.residual, b.mul(o.residual_stride, const_i64(token)))
            total = b.fadd(total, load(b, plus, row * VECTOR_BYTES, V_F32))
        to = b.add(o.out, b.mul(o.out_stride, const_i64(token)))
        store(b, total, b.add(to, b.mul(o.out_block_stride, const_i64(row))), 0)


# Tokens of the widest tile of 8-bit activations. Where a register has 16 lanes that is worth it,
# although some of its sums wait in memory while those of a group are in registers.
WIDEST = 4 if register_lanes(FEATURES) else 8
_SHAPES = [(2, 4), (2, 2), (2, 1), (1, 1)]
_VARIANTS = {(bits, *shape, planes) for bits in BITS for shape in _SHAPES for planes in (2, 1)}
_VARIANTS |= {(bits, 2, WIDEST, 1) for bits in BITS}


@vector_intrinsic(types.void, *[types.int64] * (4 + len(fields(Operands))))
def tile(b, bits, row_blocks, tokens, planes, *operands):
    """Run the tile of this shape: 2 row blocks with 4, 2 or 1 tokens, or 1 with 1.

    Of 8-bit activations there may be WIDEST tokens, too.

    planes: 2 for 16-bit activations, 1 for 8-bit ones.

    Operands are those of `Operands`, in order; any other shape writes nothing.
    """
    key = const_i64(0)
    for part in (bits, row_blocks, tokens, planes):
        key = b.add(b.shl(key, const_i64(4)), part)
    after = b.append_basic_block("tile_done")
    choice = b.switch(key, after)
    for variant in sorted(_VARIANTS):
        block = b.append_basic_block("tile")
        number = 0
        for part in variant:
            number = (number << 4) + part
        choice.add_case(const_i64(number), block)
        b.position_at_end(block)
        emit_tile(b, *variant, Operands(*operands))
        b.branch(after)
    b.position_at_end(after)
