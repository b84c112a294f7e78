"""The inner tile of the quantized matmul where registers are few: up to 64 tokens, sums in cache.

A tile of `tile` has its sums in registers over all of K. Of sixteen registers of eight lanes that
leaves too few for codes: each activation is loaded once for eight outputs. Here a group of K is the
outer loop. Its codes are unpacked into memory, once for all tokens; then 32 outputs of one or two
tokens are summed up in registers over the group. The sums of all groups lie in the first-level
cache. What is added to an output, and in which order, is as in `tile`.
"""

from __future__ import annotations

from dataclasses import fields

from llvmlite import ir
from numba import types

from qoff.kernels.cpu.jit.emit import (
    F32,
    FEATURES,
    I32,
    LANES,
    adds_words,
    const_f32,
    const_i64,
    dots,
    fma,
    lanes,
    load,
    loop,
    prefetch,
    register_lanes,
    splat,
    store,
    switch,
    widened,
    words_of,
    words_together,
)
from qoff.kernels.cpu.jit.simd import vector_intrinsic
from qoff.kernels.layout.packing import BITS

from .scales import ROW_BLOCK_BYTES, scale_and_minimum
from .tile import UNROLL, VECTOR_BYTES, Operands, codes_32

ROW_BLOCKS = 2
PANELS = register_lanes(FEATURES) > 0  # whether this processor's tiles of several tokens are panels
_SUMS = 8  # registers that are added to at the same time


class _Form:
    """What bits, planes of activations and a processor make of a panel.

    steps: of a run of 32 elements, the parts whose products are added up before they are widened,
    and what these are multiplied by. A part: where its codes lie, and the run's element they begin.
    """

    def __init__(self, bits, planes, features):
        self.bits, self.planes, self.features = bits, planes, features
        self.in_words = adds_words(features)
        self.lanes = register_lanes(features)
        self.of_block = LANES // self.lanes
        self.registers = ROW_BLOCKS * self.of_block
        self.tokens = max(1, _SUMS // self.registers // planes)
        self.ints, self.floats = (ir.VectorType(of, self.lanes) for of in (I32, F32))
        together = words_together(bits + 7) if self.in_words else UNROLL
        self.as_nibbles = together == 0  # their products do not fit into words
        starts = list(range(0, UNROLL, 4))
        if self.as_nibbles:
            self.steps = [(list(enumerate(starts, 8 * half)), 16**half) for half in range(2)]
        else:
            parts = list(enumerate(starts))
            self.steps = [
                (parts[first : first + together], 1) for first in range(0, len(parts), together)
            ]
        self.run_bytes = (1 + self.as_nibbles) * UNROLL * ROW_BLOCKS * LANES

    def place(self, part, register):
        """Where the codes of a part of a run are, in bytes."""
        return (part * self.registers + register) * 4 * self.lanes


def emit_panel(b, bits, planes, tokens, unpacked, o: Operands, features=FEATURES) -> None:
    """Emit the whole panel: 2 row blocks times `tokens`, at least one.

    unpacked: address of 8 KiB for a group's codes. Sums are in `o.out`, with no residual. Unless
    `o.ahead` is 0, the codes of the row blocks that follow are asked for meanwhile.
    """
    form = _Form(bits, planes, features)
    runs = b.sdiv(o.group_size, const_i64(UNROLL))
    packed = const_i64(UNROLL * LANES * bits // 8)  # bytes of a run of a row block
    scale_bytes = b.shl(const_i64(ROW_BLOCK_BYTES), o.width)
    token, _, close_zeros = loop(b, tokens, [])
    for row in range(ROW_BLOCKS):
        store(b, const_f32(0.0), _sums_at(b, o, token, row), 0)
    close_zeros([])

    group, _, close_groups = loop(b, o.groups, [])
    run, _, close_runs = loop(b, runs, [])
    passes = b.add(b.mul(group, runs), run)
    at_run = b.add(o.codes, b.mul(passes, packed))
    to = b.add(unpacked, b.mul(run, const_i64(form.run_bytes)))
    for row in range(ROW_BLOCKS):
        _unpack(b, form, b.add(at_run, b.mul(o.codes_stride, const_i64(row))), to, row)
    with b.if_then(b.icmp_signed("!=", o.ahead, const_i64(0))):
        for row in range(ROW_BLOCKS, 2 * ROW_BLOCKS):
            behind = b.add(at_run, b.mul(o.codes_stride, const_i64(row)))
            for line in range(0, UNROLL * LANES * bits // 8, VECTOR_BYTES):
                prefetch(b, behind, line)
    close_runs([])

    at_scales = b.add(o.scale_min, b.mul(group, scale_bytes))
    found = []
    for row in range(ROW_BLOCKS):
        address = b.add(at_scales, b.mul(o.scale_min_stride, const_i64(row)))
        found.append(scale_and_minimum(b, address, o.width, bits))
    scales, minima = (_by_register(b, form, blocks) for blocks in zip(*found, strict=True))

    several = b.sdiv(b.add(tokens, const_i64(form.tokens - 1)), const_i64(form.tokens))
    tile, _, close_tiles = loop(b, several, [])
    first, last = b.mul(tile, const_i64(form.tokens)), b.sub(tokens, const_i64(1))
    some = [_least(b, b.add(first, const_i64(i)), last) for i in range(form.tokens)]
    products = _products(b, form, o, group, runs, some, unpacked)
    token_scales = []
    for token in some:
        at_group = b.mul(const_i64(8), b.add(group, b.mul(o.groups, token)))
        address = b.add(o.scales, at_group)
        token_scales.append([splat(b, load(b, address, i, F32), form.floats) for i in (0, 4)])
    for register in range(form.registers):
        row, part = divmod(register, form.of_block)
        places = [b.add(_sums_at(b, o, t, row), const_i64(4 * form.lanes * part)) for t in some]
        # All are loaded before one is stored: beyond the last token is that token once more.
        sums = [load(b, place, 0, form.floats) for place in places]
        for place, total, product, (x_scale, x_sum) in zip(
            places, sums, products, token_scales, strict=True
        ):
            scale = b.fmul(scales[register], x_scale)
            total = fma(b, b.sitofp(product[register], form.floats), scale, total)
            store(b, fma(b, minima[register], x_sum, total), place, 0)
    close_tiles([])
    close_groups([])


def _sums_at(b, o, token, row):
    at_token = b.add(o.out, b.mul(o.out_stride, token))
    return b.add(at_token, b.mul(o.out_block_stride, const_i64(row)))


def _by_register(b, form, blocks):
    starts = range(0, LANES, form.lanes)
    return [lanes(b, block, block, start, form.lanes) for block in blocks for start in starts]


def _least(b, x, y):
    return b.select(b.icmp_signed("<", x, y), x, y)


def _unpack(b, form, codes, to, row):
    """Write the codes of a run of a row block, as bytes, to where products read them."""
    for part in range(form.of_block):
        register = row * form.of_block + part
        start = b.add(codes, const_i64(4 * form.lanes * part))
        for k, vector in codes_32(b, start, form.bits, form.ints):
            if not form.as_nibbles:
                store(b, vector, to, form.place(k // 4, register))
                continue
            mask = ir.Constant(form.ints, [0x0F0F0F0F] * form.lanes)
            for half in range(2):
                shift = ir.Constant(form.ints, [4 * half] * form.lanes)
                nibbles = b.and_(b.lshr(vector, shift), mask)
                store(b, nibbles, to, form.place(8 * half + k // 4, register))


def _products(b, form, o, group, runs, tokens, unpacked):
    """Exact sums over a group, [token][register]: of the first run, and of others if there are."""
    at_group = b.mul(group, o.group_size)
    rows = [b.add(at_group, b.mul(o.token_stride, token)) for token in tokens]
    planes = [[b.add(plane, row) for row in rows] for plane in (o.high, o.low)[: form.planes]]
    flat = _run(b, form, unpacked, planes)
    before = b.block
    more, after = b.append_basic_block("more_runs"), b.append_basic_block("all_runs")
    b.cbranch(b.icmp_signed(">", runs, const_i64(1)), more, after)
    b.position_at_end(more)
    others = b.sub(runs, const_i64(1))
    run, sums, close = loop(b, others, flat)
    run = b.add(run, const_i64(1))
    codes = b.add(unpacked, b.mul(run, const_i64(form.run_bytes)))
    along = b.mul(run, const_i64(UNROLL))
    further = _run(b, form, codes, [[b.add(x, along) for x in plane] for plane in planes])
    totals = close([b.add(x, y) for x, y in zip(sums, further, strict=True)])
    end = b.block
    b.branch(after)
    b.position_at_end(after)
    found = []
    for one, total in zip(flat, totals, strict=True):
        phi = b.phi(form.ints)
        phi.add_incoming(one, before)
        phi.add_incoming(total, end)
        found.append(phi)
    each = form.registers
    return [found[each * i : each * (i + 1)] for i in range(form.tokens)]


def _run(b, form, codes, planes):
    """Exact sums over 32 elements, by token and register.

    codes: address of the run's unpacked codes. planes: of activations, [plane][token].
    """
    add = _add_words if form.in_words else _add_dots
    totals = [None] * (form.tokens * form.registers)
    for parts, weight in form.steps:
        sums = [[None] * len(totals) for _ in planes]
        for part, k in parts:
            vectors = [
                load(b, codes, form.place(part, i), form.ints) for i in range(form.registers)
            ]
            for plane, by_token in enumerate(planes):
                for token, address in enumerate(by_token):
                    x = splat(b, load(b, address, k, I32), form.ints)
                    for register, vector in enumerate(vectors):
                        place = token * form.registers + register
                        sums[plane][place] = add(b, form, sums[plane][place], vector, x)
        for plane, values in enumerate(sums):
            factor = weight * (256 if plane + 1 < form.planes else 1)
            for place, value in enumerate(values):
                value = _as_total(b, form, value, factor)
                before = totals[place]
                totals[place] = value if before is None else b.add(before, value)
    return totals


def _add_words(b, form, words, u8, s8):
    products = words_of(b, u8, s8)
    return products if words is None else b.add(words, products)


def _add_dots(b, form, sums, u8, s8):
    before = ir.Constant(form.ints, [0] * form.lanes) if sums is None else sums
    return dots(b, before, [(u8, s8)], (form.bits, 7), features=form.features)


def _as_total(b, form, sums, factor):
    if form.in_words:
        return widened(b, sums, factor)
    if factor == 1:
        return sums
    return b.shl(sums, ir.Constant(form.ints, [factor.bit_length() - 1] * form.lanes))


@vector_intrinsic(types.void, *[types.int64] * (4 + len(fields(Operands))))
def panel(b, bits, planes, tokens, unpacked, *operands):
    """Run a panel of up to PANEL_TOKENS tokens; see `emit_panel`. Only where PANELS is true."""
    if not PANELS:
        return
    key = b.add(b.shl(bits, const_i64(4)), planes)
    o = Operands(*operands)
    switch(
        b,
        key,
        {
            (each << 4) + count: lambda each=each, count=count: emit_panel(
                b, each, count, tokens, unpacked, o
            )
            for each in BITS
            for count in (1, 2)
        },
    )
