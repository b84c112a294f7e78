"""Keys of single tokens as rows of float32 numbers, wherever a sequence has them.

A sequence's tokens are packed, in one part of the cache or more, or they are not. Where the tokens
of one kind end is always a multiple of 16.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
from llvmlite import ir
from numba import types

from qoff.kernels.cpu.jit import emit, simd
from qoff.kernels.cpu.jit.compiled import inner
from qoff.kernels.cpu.jit.simd import f32x16, vector_intrinsic
from qoff.kernels.cpu.operands import int64s, offsets
from qoff.kernels.layout.kv_format import BLOCK_TOKENS
from qoff.kernels.layout.layer_cache import ITEM_FIELDS, PackedTokens

_ITEM_BYTES = 8 * len(ITEM_FIELDS)
_SLOT, _PACKED, _BEFORE = (
    8 * ITEM_FIELDS.index(name) for name in ("slot", "packed tokens", "tokens before")
)
_BYTES = ir.VectorType(ir.IntType(8), 16)


class TokensPart(ctypes.Structure):
    """One part of the packed tokens: addresses, sizes in elements, a block's in bytes."""

    _fields_ = int64s("pool", "block_bytes", "table", "table_width", "items")


class Tokens(ctypes.Structure):
    """Where the keys of the sequences of a pass are.

    groups: address of `Ragged.items`, 0 where each row is one; `each`: the most rows of one. keys:
    those that are not packed, for `capacity` tokens of each sequence.
    """

    _fields_ = int64s(
        "groups", "group_count", "each", "positions", "slots", "keys", "capacity", "dim", "bits",
        "k_scale", "parts", "part_count",
    )  # fmt: skip


POOL, BLOCK_BYTES, TABLE, TABLE_WIDTH, ITEMS = offsets(TokensPart)
(GROUPS, GROUP_COUNT, EACH, POSITIONS, SLOTS, KEYS, CAPACITY, DIM, BITS, K_SCALE, PARTS,
 PART_COUNT) = offsets(Tokens)  # fmt: skip
_PART_BYTES = ctypes.sizeof(TokensPart)


def described(packed: Sequence[PackedTokens]) -> ctypes.Array[TokensPart]:
    """The parts, as a job finds tokens in them."""
    return (TokensPart * max(1, len(packed)))(
        *(
            TokensPart(
                part.pool.data_ptr(), part.pool.stride(0), part.table.blocks.data_ptr(),
                part.table.blocks.shape[1], part.table.items.data_ptr(),
            )
            for part in packed
        )
    )  # fmt: skip


@vector_intrinsic(f32x16, *[types.int64] * 3)
def _codes_16(b, address, shift, mask):
    """(byte >> shift) & mask of 16 bytes, as float32 numbers."""
    wide = b.zext(emit.load(b, address, 0, _BYTES), emit.V_I32)
    shift, mask = (emit.splat(b, b.trunc(x, emit.I32), emit.V_I32) for x in (shift, mask))
    return b.uitofp(b.and_(b.lshr(wide, shift), mask), emit.V_F32)


@inner
def group_rows(tokens, group):
    """First row and number of rows of a group."""
    groups = simd.peek_i64(tokens + GROUPS)
    if groups == 0:
        return group, 1
    return simd.peek_i64(groups + 16 * group), simd.peek_i64(groups + 16 * group + 8)


@inner
def position_of(tokens, row):
    """The position of a row in its sequence."""
    return simd.peek_i64(simd.peek_i64(tokens + POSITIONS) + 8 * row)


@inner
def _record(part, group, block):
    """Address of a block of the sequence of a group."""
    item = simd.peek_i64(part + ITEMS) + _ITEM_BYTES * group
    entry = simd.peek_i64(item + _SLOT) * simd.peek_i64(part + TABLE_WIDTH) + block
    number = simd.peek_i32(simd.peek_i64(part + TABLE) + 4 * entry)
    return simd.peek_i64(part + POOL) + number * simd.peek_i64(part + BLOCK_BYTES)


@inner
def find(tokens, group, position):
    """Where a token is: address of its record and place there; or 0, and its place unpacked."""
    packed_before = 0
    for i in range(simd.peek_i64(tokens + PART_COUNT)):
        part = simd.peek_i64(tokens + PARTS) + _PART_BYTES * i
        item = simd.peek_i64(part + ITEMS) + _ITEM_BYTES * group
        inside = position - simd.peek_i64(item + _BEFORE)
        count = simd.peek_i64(item + _PACKED)
        if 0 <= inside < count:
            return _record(part, group, inside // BLOCK_TOKENS), inside % BLOCK_TOKENS
        if inside >= count:
            packed_before += count
    return 0, position - packed_before


@inner
def packed_before(tokens, group):
    """Packed tokens of the sequence of a group."""
    count = 0
    for i in range(simd.peek_i64(tokens + PART_COUNT)):
        items = simd.peek_i64(simd.peek_i64(tokens + PARTS) + _PART_BYTES * i + ITEMS)
        count += simd.peek_i64(items + _ITEM_BYTES * group + _PACKED)
    return count


@inner
def widen_scales(tokens, record, scales):
    """Scales and minima of a record as float32 [2, dim]."""
    source = record + simd.peek_i64(tokens + K_SCALE)
    for i in range(0, 2 * simd.peek_i64(tokens + DIM), 16):
        simd.store_f32(scales + 4 * i, simd.load_f16(source + 2 * i))


@inner
def _unpack(record, token, dim, bits, scales, out):
    """The key of a token of a record; its layout: `layout.kv_format`."""
    half = dim // 2
    if bits == 8:
        codes, shift, mask = record + token * dim, 0, 255
    elif bits == 4:
        codes, shift, mask = record + token * half, 0, 15
    else:
        codes, shift, mask = record + token % 32 * half, token // 32 * 2, 3
    upper_bits = record + (32 + token % 16) * half
    for i in range(0, dim, 16):
        in_upper = bits != 8 and i >= half
        at, more = (i - half, shift + 4) if in_upper else (i, shift)
        code = _codes_16(codes + at, more, mask)
        if bits == 3:
            bit = _codes_16(upper_bits + at, token // 16 + (4 if in_upper else 0), 1)
            code = simd.mul_add(bit, simd.splat_f32(np.float32(4.0)), code)
        scale = simd.load_f32(scales + 4 * i)
        simd.store_f32(
            out + 4 * i, simd.mul_add(code, scale, simd.load_f32(scales + 4 * (dim + i)))
        )


@inner
def _copy_unpacked(tokens, slot, place, out):
    """The key of a token that is not packed: its channels are 16 numbers apart."""
    dim = simd.peek_i64(tokens + DIM)
    first = slot * simd.peek_i64(tokens + CAPACITY) + place // 16 * 16
    source = simd.peek_i64(tokens + KEYS) + 4 * (first * dim + place % 16)
    for i in range(dim):
        simd.poke_f32(out + 4 * i, simd.peek_f32(source + 64 * i))


@inner
def read_key(tokens, group, slot, position, last, scales, out):
    """Write the key of a token, float32 [dim]; returns its record, 0 without one.

    scales: float32 [2, dim], those of the record `last`, and then of this token's.
    """
    record, token = find(tokens, group, position)
    if record == 0:
        _copy_unpacked(tokens, slot, token, out)
        return last
    if record != last:
        widen_scales(tokens, record, scales)
    dim, bits = simd.peek_i64(tokens + DIM), simd.peek_i64(tokens + BITS)
    _unpack(record, token, dim, bits, scales, out)
    return record


@inner
def turn_heads(rows, heads, dim, lanes, out):
    """Rows [heads, dim] as columns, [lanes / 16, dim, 16]; lanes without a head are 0."""
    if heads < lanes:
        for i in range(4 * dim * (lanes - 16), 4 * dim * lanes, 64):
            simd.store_f32(out + i, simd.splat_f32(np.float32(0.0)))
    for head in range(heads):
        column = out + 4 * (head // 16 * 16 * dim + head % 16)
        for i in range(dim):
            simd.poke_f32(column + 64 * i, simd.peek_f32(rows + 4 * (head * dim + i)))
