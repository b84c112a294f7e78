"""y = x W^T for a few tokens, on tensor cores, straight from packed codes.

At one token the codes must be unpacked as fast as memory delivers them: about three instructions
per weight on the fastest GPUs. So a code costs half a byte permutation and no conversion, scale or
subtraction, and the multiplication is one tensor-core instruction for eight codes of a lane:

- The codes (plus an exact offset, see `nibbles`) are the left operand. The right one has eight
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

import triton
import triton.language as tl
from torch import Tensor

from qoff.kernels.layout.qtensor import QTensor
from qoff.kernels.triton.launch.gpu import Gpu

from .nibbles import byte_values, dot16, load_scale_min, low_high
from .product import SPLITS_MAX, Config, multiply, write

COLUMNS = tl.constexpr(8)  # of the right operand: the narrowest that tensor cores take
STEP_BYTES_MIN = 32  # of a row that tensor cores take at once
STEP_BYTES = 128  # of a row that a warp takes at once: a cache line

# 1.0 for every byte. Made from the codes so that the tile gets their layout.
_ONES_F16 = tl.constexpr("mov.b32 $0, 0x3c003c00; mov.b32 $1, 0x3c003c00; // $2")
_ONES_BF16 = tl.constexpr("mov.b32 $0, 0x3f803f80; mov.b32 $1, 0x3f803f80; // $2")


@dataclass(frozen=True)
class GemvConfig(Config):
    """block_n: rows of a program, a multiple of 16. All warps share each step along K."""

    block_n: int = 32


@triton.jit
def _ones(codes, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """A tile of ones of the shape of `codes` (uint8), in the layout of the codes."""
    if ASM:
        ones = tl.inline_asm_elementwise(
            _ONES_F16 if tl.float16 == DTYPE else _ONES_BF16,
            "=r,=r,r",
            [codes],
            dtype=DTYPE.value,
            is_pure=True,
            pack=4,
        )
    else:
        ones = tl.full(codes.shape, 1.0, DTYPE)
    return ones


@triton.jit
def _group_sums(codes, first, second, FORM: tl.constexpr):
    """Sums over groups of (offset + code) * x, and of x; `second` is x of the high nibbles."""
    SHAPE: tl.constexpr = [codes.shape[0], codes.shape[1], first.shape[2]]
    zero = tl.zeros(SHAPE, tl.float32)
    ones = _ones(codes, first.dtype, FORM.asm)
    x_sum = dot16(ones, first, zero, FORM.asm)
    if FORM.bits == 4:
        low, high = low_high(codes, first.dtype, FORM.asm, True)
        code_sum = dot16(low, first, zero, FORM.asm)
        code_sum = dot16(high, second, code_sum, FORM.asm)
        x_sum = dot16(ones, second, x_sum, FORM.asm)
    else:
        code_sum = dot16(byte_values(codes, first.dtype, FORM.asm), first, zero, FORM.asm)
    return code_sum, x_sum


@triton.jit
def gemv_sums(
    x, codes, scale_min, row, M, N, row_bytes, x_stride, start, steps, FORM: tl.constexpr
):
    """Rows of W times up to FORM.tokens rows of x: float32 [BLOCK_N, COLS // GROUPS].

    row: [BLOCK_N], those from N on are read as the last one. start: first of the pieces of GROUPS
    groups along K; each of WARPS takes one in a step. Column c of a product is token c // GROUPS
    and group c % GROUPS of the step.
    """
    BLOCK_N: tl.constexpr = row.shape[0]
    BITS: tl.constexpr = FORM.bits
    GROUPS: tl.constexpr = FORM.groups
    GROUP_BYTES: tl.constexpr = FORM.group_bytes
    WARPS: tl.constexpr = FORM.config.warps
    COLS: tl.constexpr = max(COLUMNS, FORM.tokens)
    BYTES: tl.constexpr = GROUPS * GROUP_BYTES  # of a row, for a warp in a step
    SPREAD: tl.constexpr = 8 // BITS  # elements in a byte
    IN_FLOAT16: tl.constexpr = x.dtype.element_ty == tl.float16
    OFFSET: tl.constexpr = 0.0 if BITS == 8 else 1024.0 if IN_FLOAT16 else 128.0
    safe_row = tl.minimum(row, N - 1)
    part = tl.arange(0, WARPS)
    byte = tl.arange(0, BYTES)
    column = tl.arange(0, COLS)
    token = column // GROUPS
    group = column % GROUPS
    used = token < tl.minimum(FORM.tokens, M)

    element = byte if BITS == 8 else (byte // 16) * 32 + byte % 16
    mine = used[None, :] & ((byte // GROUP_BYTES)[:, None] == group[None, :])
    mine = mine[None, :, :] & (part >= 0)[:, None, None]
    # With one group in a step, all columns share a scale.
    scale_group = group if GROUPS > 1 else tl.arange(0, 1)
    scaled = used if GROUPS > 1 else scale_group == 0
    scaled = scaled[None, None, :] & (part >= 0)[:, None, None] & (row >= 0)[None, :, None]

    first_byte = (start + part) * BYTES
    code_row = codes + safe_row[None, :, None].to(tl.int64) * row_bytes
    code_pointer = code_row + first_byte[:, None, None] + byte[None, None, :]
    x_pointer = (
        x
        + (token * x_stride)[None, None, :]
        + (first_byte * SPREAD)[:, None, None]
        + element[None, :, None]
    )
    first_group = ((start + part) * GROUPS)[:, None, None] + scale_group[None, None, :]
    pair = first_group * N + safe_row[None, :, None]
    total = tl.zeros((WARPS, BLOCK_N, COLS), tl.float32)
    for step in tl.range(0, steps, num_stages=FORM.config.stages):
        done = step * (WARPS * BYTES)
        if FORM.even:
            packed = tl.load(code_pointer + done)
            inside = mine
            live = scaled
        else:
            left = row_bytes - done - first_byte
            inside_codes = (byte[None, None, :] < left[:, None, None]) & (row >= 0)[None, :, None]
            packed = tl.load(code_pointer + done, mask=inside_codes, other=0)
            inside = mine & (byte[None, :, None] < left[:, None, None])
            live = scaled & ((scale_group * GROUP_BYTES)[None, None, :] < left[:, None, None])
        first = tl.load(x_pointer + done * SPREAD, mask=inside, other=0.0)
        second = first
        if BITS == 4:
            second = tl.load(x_pointer + done * SPREAD + 16, mask=inside, other=0.0)
        index = pair + step * (WARPS * GROUPS) * N
        scale, minimum = load_scale_min(scale_min, index, live)
        code_sum, x_sum = _group_sums(packed, first, second, FORM)
        total += code_sum * scale
        total += x_sum * (minimum - OFFSET * scale)

    tokens = tl.reshape(tl.sum(total, axis=0), (BLOCK_N, COLS // GROUPS, GROUPS))
    return tl.sum(tokens, axis=2)  # [BLOCK_N, tokens]


@triton.jit(do_not_specialize=["M", "steps"])
def gemv_kernel(
    x, codes, scale_min, bias, out, M, N, row_bytes, x_stride, steps, FORM: tl.constexpr
):
    """Rows program_id(0) * BLOCK_N .., part program_id(1) of K; see `gemv_sums` and `write`."""
    BLOCK_N: tl.constexpr = FORM.config.block_n
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    start = tl.program_id(1) * steps * FORM.config.warps
    y = gemv_sums(x, codes, scale_min, row, M, N, row_bytes, x_stride, start, steps, FORM)
    token = tl.arange(0, y.shape[1])
    write(y, row, token, tl.minimum(FORM.tokens, M), tl.program_id(1), bias, out, M, N, FORM)


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
    config = GemvConfig(block_n=32 if tokens <= 2 else 64, registers=255 if tokens > 8 else 168)
    wanted = 2 * gpu.processors
    while config.block_n > 16 and triton.cdiv(rows, config.block_n) < wanted:
        config = replace(config, block_n=config.block_n // 2)
    programs = triton.cdiv(rows, config.block_n)
    step = config.warps * groups_per_step(tokens, group_bytes) * group_bytes
    splits = min(wanted // programs, row_bytes // (2 * step), SPLITS_MAX)
    return replace(config, splits=splits if splits >= 2 else 1)


def gemv(x: Tensor, weight: QTensor, bias: Tensor | None, config: GemvConfig) -> Tensor:
    """x @ W.T + bias for up to `tokens_max` rows of x; operands as `w4_linear` takes them."""
    tokens, group_bytes = triton.next_power_of_2(len(x)), weight.group_size * weight.bits // 8
    groups = groups_per_step(tokens, group_bytes)
    step = groups * group_bytes * config.warps
    grid = (triton.cdiv(weight.shape[0], config.block_n), config.splits)
    return multiply(gemv_kernel, grid, x, weight, bias, config, step, tokens, groups)
