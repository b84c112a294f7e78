"""y = x W^T for a few tokens, on tensor cores, straight from packed codes.

At one token the codes must be unpacked as fast as memory delivers them: about three instructions
per weight on the fastest GPUs. So a code costs little more than half an instruction (`planes`) and
no conversion, scale or subtraction, and the multiplication is one tensor-core instruction for eight
codes of a lane:

- The codes (plus an exact offset) are the left operand. The right one has eight
  columns: column (token t, group j) holds x of the token in the rows of group j and zeros
  elsewhere. One product thus gives the sum over each group by itself, which is then scaled in
  float32: y += scale * (sum(code * x)) + minimum * sum(x).
- sum(x) of a group comes from a second product, whose left operand is the constant one; it also
  takes the offset off again.
- A leading dimension of the products splits K over the warps of a program, so that few rows keep
  many warps busy; their sums meet in shared memory at the end.

If there are too few rows for the GPU even so, programs split K too (`splits`): they write float32
partial sums, which a second kernel adds in a fixed order.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from qoff.kernels.layout.qtensor import QTensor
from qoff.kernels.triton.launch.gpu import Gpu
from qoff.kernels.triton.launch.overlap import wait_for_earlier
from qoff.kernels.triton.launch.sizes import cdiv, next_power_of_2

from .nibbles import dot16, load_scale_min
from .planes import byte_planes, halves, nibble_planes, ones_like
from .product import (
    SPLITS_MAX,
    Case,
    Config,
    Epilogue,
    Prepared,
    multiply,
    prepare,
    rows_of,
    splits_for,
    write,
)

COLUMNS = tl.constexpr(8)  # of the right operand: the narrowest that tensor cores take
STEP_BYTES_MIN = 32  # of a row that tensor cores take at once
STEP_BYTES = 128  # of a row that a warp takes at once: a cache line

RAISED_TOKENS = tl.constexpr(4)  # up to which unpacking counts more than adding sums up


@dataclass(frozen=True)
class GemvConfig(Config):
    """block_n: rows of a program, a multiple of 16. All warps share each step along K."""

    block_n: int = 32


@triton.jit
def _group_sums(
    codes,
    first,
    second,
    OFFSET: tl.constexpr,
    RAISED: tl.constexpr,
    DTYPE: tl.constexpr,
    FORM: tl.constexpr,
):
    """Sums over groups of (OFFSET + code) * x, RAISED: of code * x, and of x.

    first, second: pairs of x, uint32; `second` is x of the high nibbles.
    """
    SHAPE: tl.constexpr = [codes.shape[0], codes.shape[1], first.shape[2]]
    zero = tl.zeros(SHAPE, tl.float32)
    ones = ones_like(codes, DTYPE, FORM.asm)
    x_even, x_odd = halves(first, DTYPE)
    x_sum = dot16(ones, x_even, zero, FORM.asm)
    x_sum = dot16(ones, x_odd, x_sum, FORM.asm)
    if FORM.bits == 4:
        even, odd, high_even, high_odd = nibble_planes(codes, DTYPE, RAISED, FORM.asm)
    else:
        even, odd = byte_planes(codes, DTYPE, FORM.asm)
    code_sum = dot16(even, x_even, zero, FORM.asm)
    code_sum = dot16(odd, x_odd, code_sum, FORM.asm)
    if FORM.bits == 4:
        x_even, x_odd = halves(second, DTYPE)
        if RAISED:
            high_sum = dot16(high_even, x_even, zero, FORM.asm)
            high_sum = dot16(high_odd, x_odd, high_sum, FORM.asm)
            x_high_sum = dot16(ones, x_even, zero, FORM.asm)
            x_high_sum = dot16(ones, x_odd, x_high_sum, FORM.asm)
            code_sum += (high_sum - OFFSET * x_high_sum) * 0.0625 - OFFSET * x_sum
            x_sum += x_high_sum
        else:
            code_sum = dot16(high_even, x_even, code_sum, FORM.asm)
            code_sum = dot16(high_odd, x_odd, code_sum, FORM.asm)
            x_sum = dot16(ones, x_even, x_sum, FORM.asm)
            x_sum = dot16(ones, x_odd, x_sum, FORM.asm)
    return code_sum, x_sum


@triton.jit
def gemv_sums(
    x, codes, scale_min, row, M, N, row_bytes, x_stride, start, steps, FORM: tl.constexpr
):
    """Rows of W times up to FORM.tokens rows of x: float32 [BLOCK_N, COLS // GROUPS].

    row: [BLOCK_N], those from N on are read as the last one. start: first of the pieces of GROUPS
    groups along K; each of WARPS takes one in a step. Column c of a product is token c // GROUPS
    and group c % GROUPS of the step. Codes and x are read two neighbours at a time.
    """
    BLOCK_N: tl.constexpr = row.shape[0]
    DTYPE: tl.constexpr = x.dtype.element_ty
    BITS: tl.constexpr = FORM.bits
    GROUPS: tl.constexpr = FORM.groups
    GROUP_PAIRS: tl.constexpr = FORM.group_bytes // 2
    WARPS: tl.constexpr = FORM.config.warps
    COLS: tl.constexpr = max(COLUMNS, FORM.tokens)
    PAIRS: tl.constexpr = GROUPS * GROUP_PAIRS  # of a row, for a warp in a step
    SPREAD: tl.constexpr = 8 // BITS  # elements in a byte
    IS_FLOAT16: tl.constexpr = tl.float16 == DTYPE
    OFFSET: tl.constexpr = 1024.0 if IS_FLOAT16 else 128.0 if BITS == 4 else 0.0
    RAISED: tl.constexpr = IS_FLOAT16 and BITS == 4 and FORM.tokens <= RAISED_TOKENS
    safe_row = row if FORM.whole else tl.minimum(row, N - 1)
    part = tl.arange(0, WARPS)
    pair = tl.arange(0, PAIRS)
    column = tl.arange(0, COLS)
    token = column // GROUPS
    group = column % GROUPS
    used = token < tl.minimum(FORM.tokens, M)

    element = pair if BITS == 8 else (pair // 8) * 16 + pair % 8
    mine = used[None, :] & ((pair // GROUP_PAIRS)[:, None] == group[None, :])
    mine = mine[None, :, :] & (part >= 0)[:, None, None]
    # With one group in a step, all columns share a scale.
    scale_group = group if GROUPS > 1 else tl.arange(0, 1)
    scaled = used if GROUPS > 1 else scale_group == 0
    # Two bytes of a row are too few for an asynchronous copy, so rows from N on are masked: eight
    # neighbours are copied at once where the compiler sees that they are neighbours in memory, too.
    NEIGHBOURS: tl.constexpr = FORM.aligned and scale_min.dtype.element_ty == tl.uint8
    scale_row = row if NEIGHBOURS else safe_row
    scaled_row = row < N if NEIGHBOURS else row >= 0
    scaled = scaled[None, None, :] & (part >= 0)[:, None, None] & scaled_row[None, :, None]

    row_pairs = row_bytes // 2
    first_pair = (start + part) * PAIRS
    code_row = codes.to(tl.pointer_type(tl.uint16))
    code_row += safe_row[None, :, None].to(tl.int64) * row_pairs
    code_pointer = code_row + first_pair[:, None, None] + pair[None, None, :]
    x_pointer = (
        x.to(tl.pointer_type(tl.uint32))
        + (token * (x_stride // 2))[None, None, :]
        + (first_pair * SPREAD)[:, None, None]
        + element[None, :, None]
    )
    first_group = ((start + part) * GROUPS)[:, None, None] + scale_group[None, None, :]
    index = first_group * N + scale_row[None, :, None]
    total = tl.zeros((WARPS, BLOCK_N, COLS), tl.float32)
    for step in tl.range(0, steps, num_stages=FORM.config.stages):
        done = step * (WARPS * PAIRS)
        if FORM.even:
            packed = tl.load(code_pointer + done)
            inside = mine
            live = scaled
        else:
            left = row_pairs - done - first_pair
            inside_codes = (pair[None, None, :] < left[:, None, None]) & (row >= 0)[None, :, None]
            packed = tl.load(code_pointer + done, mask=inside_codes, other=0)
            inside = mine & (pair[None, :, None] < left[:, None, None])
            live = scaled & ((scale_group * GROUP_PAIRS)[None, None, :] < left[:, None, None])
        first = tl.load(x_pointer + done * SPREAD, mask=inside, other=0)
        second = first
        if BITS == 4:
            second = tl.load(x_pointer + done * SPREAD + 8, mask=inside, other=0)
        here = index + step * (WARPS * GROUPS) * N
        scale, minimum = load_scale_min(scale_min, here, live, BITS)
        if NEIGHBOURS:  # without a choice, they would be copied by way of registers
            minimum = tl.where(live, minimum, 0.0)
        code_sum, x_sum = _group_sums(packed, first, second, OFFSET, RAISED, DTYPE, FORM)
        total += code_sum * scale
        if not RAISED:
            minimum -= OFFSET * scale
        total += x_sum * minimum

    tokens = tl.reshape(tl.sum(total, axis=0), (BLOCK_N, COLS // GROUPS, GROUPS))
    return tl.sum(tokens, axis=2)  # [BLOCK_N, tokens]


@triton.jit(do_not_specialize=["M", "steps"])
def gemv_kernel(
    x, codes, scale_min, bias, residual, out, M, N, row_bytes, x_stride, steps, FORM: tl.constexpr
):
    """The rows of program_id(0), part program_id(2) of K; see `gemv_sums` and `write`."""
    part = tl.program_id(2)
    row = rows_of(tl.program_id(0), FORM.config.block_n, FORM)
    start = part * steps * FORM.config.warps
    wait_for_earlier(FORM.overlap)
    y = gemv_sums(x, codes, scale_min, row, M, N, row_bytes, x_stride, start, steps, FORM)
    token = tl.arange(0, y.shape[1])
    write(y, row, token, tl.minimum(FORM.tokens, M), part, bias, residual, out, M, N, FORM)


def tokens_max(group_bytes: int) -> int:
    """How many tokens pay for groups of `group_bytes` of codes: each group is scaled by itself."""
    return 16 if group_bytes >= STEP_BYTES_MIN else 4


def groups_per_step(tokens: int, group_bytes: int) -> int:
    """Groups of a row that a warp takes in a step: as columns and STEP_BYTES allow."""
    return max(1, min(COLUMNS.value // tokens, STEP_BYTES // group_bytes))


def choose(tokens: int, rows: int, row_bytes: int, group_bytes: int, gpu: Gpu) -> GemvConfig:
    """The configuration without a measured one.

    Few rows want smaller programs with more warps along K, and at last programs along K, until
    there are about two programs for each multiprocessor.
    """
    registers = 255 if tokens > 8 or group_bytes > 64 else 168
    config = GemvConfig(block_n=32 if tokens <= 2 else 64, registers=registers)
    if gpu.capability == 90 and tokens <= 2:
        wide = 64 if group_bytes <= 64 else 32  # as registers allow
        one_warp = replace(config, warps=1)
        if found := _for_hopper(one_warp, wide, rows, row_bytes, gpu):
            return found
    wanted = 2 * gpu.processors
    while config.block_n > 16 and cdiv(rows, config.block_n) < wanted:
        config = replace(config, block_n=config.block_n // 2)
    programs = cdiv(rows, config.block_n)
    step = config.warps * groups_per_step(tokens, group_bytes) * group_bytes
    splits = min(wanted // programs, row_bytes // (2 * step), SPLITS_MAX)
    return replace(config, splits=splits if splits >= 2 else 1)


def _for_hopper(
    config: GemvConfig, wide: int, rows: int, row_bytes: int, gpu: Gpu
) -> GemvConfig | None:
    """What was fastest, or nearly so, for a token on an H200; None for too little work.

    Programs of one warp, with many rows; of few rows programs along K of four steps at least.
    """
    if cdiv(rows, wide) >= 3 * gpu.processors:
        return replace(config, block_n=wide, registers=255)
    programs = cdiv(rows, config.block_n)
    splits = splits_for(programs, 4 * gpu.processors, row_bytes // (4 * STEP_BYTES))
    enough = 5 * programs * splits > 6 * gpu.processors
    return replace(config, splits=splits) if enough else None


def in_pairs(x: Tensor) -> Tensor:
    """x, or a copy of it where its rows do not start at multiples of 4 bytes."""
    if x.stride(0) % 2 or x.data_ptr() % 4:
        return x.clone(memory_format=torch.contiguous_format)
    return x


def gemv(
    x: Tensor, weight: QTensor, bias: Tensor | None, config: GemvConfig, end: Epilogue
) -> Tensor:
    """x @ W.T + bias and what `end` says, for up to `tokens_max` rows of x; operands as `w4_linear`
    takes them."""
    x = in_pairs(x)
    return multiply(_prepared(Case.of(x, weight, bias, end), config), x, weight, bias, end)


@cache
def _prepared(case: Case, config: GemvConfig) -> Prepared:
    tokens, group_bytes = next_power_of_2(case.m), case.group * case.bits // 8
    groups = groups_per_step(tokens, group_bytes)
    step = groups * group_bytes * config.warps
    programs = (cdiv(case.n, config.block_n), 1)
    return prepare(gemv_kernel, programs, config, step, case, tokens, groups)
