"""Experts from the CPU's packing to a GPU's: they lie in host memory as the CPU computes them.

A program has some columns of a block of 16 rows, which both packings have in the same bytes of a
matrix but for codes that a GPU reads in more bits (`layout.widening`).
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from qoff.kernels.layout.packing import EACH_BYTE, ROW_BLOCK, reads
from qoff.kernels.layout.qexperts import QExperts
from qoff.kernels.layout.scales import COMPACT
from qoff.kernels.triton.launch.options import LAUNCH
from qoff.kernels.triton.launch.sizes import cdiv

_BLOCKS = 32  # of 32 columns, that a program has
_WARPS = 4
_PARTS = 3  # of a quad, at most


class Form(NamedTuple):
    """What codes are. parts: of each quad, `_PARTS` of (word, bits to the right, mask)."""

    bits: int
    wide: int  # bits that the GPU reads
    spread: int  # bits to the left where scales are compact; -1: where they can be divided; 0
    group_blocks: int  # blocks of 32 columns that share a scale
    parts: tuple[tuple[int, int, int], ...]


@triton.jit
def _part(codes, inside, found, PART: tl.constexpr, FORM: tl.constexpr):
    """What was found of a quad, and another part of it."""
    WORD: tl.constexpr = FORM.parts[PART][0]
    RIGHT: tl.constexpr = FORM.parts[PART][1]
    MASK: tl.constexpr = FORM.parts[PART][2]
    if MASK != 0:
        found |= (tl.load(codes + WORD * 16, mask=inside, other=0) >> RIGHT) & MASK
    return found


@triton.jit
def _quad(codes, inside, QUAD: tl.constexpr, FORM: tl.constexpr):
    """Elements 4 QUAD to 4 QUAD + 3 of blocks, a byte each: int32 like `codes`."""
    found = tl.zeros(codes.shape, tl.int32)
    for part in tl.static_range(3):
        found = _part(codes, inside, found, 3 * QUAD + part, FORM)
    return found


@triton.jit
def _smaller(scale, FORM: tl.constexpr):
    """A scale divided as codes are spread, and whether that is exact."""
    TIMES: tl.constexpr = 1 << (FORM.wide - FORM.bits)
    smaller = (scale.to(tl.float32) * (1.0 / TIMES)).to(scale.dtype)
    return smaller, smaller.to(tl.float32) * TIMES == scale.to(tl.float32)


@triton.jit
def repack_experts_kernel(
    codes, scale_min, out_codes, out_scale_min, code_distance, scale_distance, out_code_distance,
    out_scale_distance, N, blocks, BLOCKS: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """BLOCKS blocks of 32 columns of 16 rows of an expert, codes as int32.

    Distances: elements from an expert to the next. blocks: of a row of N.
    """
    rows16 = tl.program_id(1).to(tl.int64)
    expert = tl.program_id(2).to(tl.int64)
    r = tl.arange(0, 16)
    row = rows16 * 16 + r
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    inside = (block < blocks)[:, None] & (row < N)[None, :]
    groups = blocks // FORM.group_blocks
    scales = scale_min + expert * scale_distance + rows16 * groups * 32
    source = (rows16 * blocks + block[:, None]) * (FORM.bits * 16) + r[None, :]
    source = codes + expert * code_distance + source
    target = (row[None, :] * blocks + block[:, None]) * FORM.wide
    target = out_codes + expert * out_code_distance + target
    if FORM.spread < 0:
        own = scales + (block // FORM.group_blocks)[:, None] * 32 + r[None, :]
        _, exact = _smaller(tl.load(own, mask=inside, other=0), FORM)
        left = exact.to(tl.int32) * (FORM.wide - FORM.bits)
    else:
        left = FORM.spread
    WIDE: tl.constexpr = FORM.wide  # Triton 3.6 takes no field here
    for word in tl.static_range(WIDE):
        found = _quad(source, inside, word, FORM)
        if FORM.wide == 4:
            found |= _quad(source, inside, word + 4, FORM) << 4
        tl.store(target + word, found << left, mask=inside)
    GROUPS: tl.constexpr = BLOCKS // FORM.group_blocks
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    there = (group < groups)[:, None] & (row < N)[None, :]
    pair = scales + group[:, None] * 32 + r[None, :]
    scale = tl.load(pair, mask=there, other=0)
    minimum = tl.load(pair + 16, mask=there, other=0)
    if FORM.spread < 0:
        smaller, exact = _smaller(scale, FORM)
        scale = tl.where(exact, smaller, scale)
    place = out_scale_min + expert * out_scale_distance + (group[:, None] * N + row[None, :]) * 2
    tl.store(place, scale, mask=there)
    tl.store(place + 1, minimum, mask=there)


def repack_experts(packed: QExperts, into: QExperts) -> None:
    """Write experts of packing rows16 to the memory of `into`, bit for bit as `for_kernels` does.

    Nothing is checked: see `kernels.repack`.
    """
    count, (n, k) = packed.count, packed.shape
    form = _form(packed.bits, into.bits, packed.group_size, packed.scale_min.dtype == COMPACT)
    codes, out_codes = packed.codes.view(torch.int32), into.codes.view(torch.int32)
    scale_min, out_scale_min = packed.scale_min, into.scale_min
    with torch.cuda.device_of(codes):  # Triton launches on the current GPU
        repack_experts_kernel[(cdiv(k // 32, _BLOCKS), cdiv(n, ROW_BLOCK), count)](
            codes,
            scale_min,
            out_codes,
            out_scale_min,
            codes.stride(0),
            scale_min.stride(0),
            out_codes.stride(0),
            out_scale_min.stride(0),
            n,
            k // 32,
            BLOCKS=_BLOCKS,
            FORM=form,
            num_warps=_WARPS,
            num_stages=1,
            **LAUNCH,
        )


@cache
def _form(bits: int, wide: int, group_size: int, compact: bool) -> Form:
    spread = 0
    if wide != bits and compact:
        spread = wide - bits
    elif wide != bits and wide == 8:
        spread = -1
    parts = list[tuple[int, int, int]]()
    for quad in reads(bits):
        some = [(word, right, _signed(mask * EACH_BYTE)) for word, right, mask in quad]
        parts += some + [(0, 0, 0)] * (_PARTS - len(some))
    return Form(bits, wide, spread, group_size // 32, tuple(parts))


def _signed(word: int) -> int:
    """A word of 32 bits as int32 has it."""
    return word - (1 << 32) if word >> 31 else word
