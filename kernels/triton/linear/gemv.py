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
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from qoff.kernels.layout.qtensor import QTensor
from qoff.kernels.triton.launch import tuned
from qoff.kernels.triton.launch.gpu import Gpu

from .nibbles import byte_values, dot16, load_scale_min, low_high
from .product import SPLITS_MAX, ends, multiply

COLUMNS = 8  # of the right operand: the narrowest that tensor cores take
STEP_BYTES_MIN = 32  # of a row that tensor cores take at once
STEP_BYTES = 128  # of a row that a warp takes at once: a cache line

# 1.0 for every byte. Made from the codes so that the tile gets their layout.
_ONES_F16 = tl.constexpr("mov.b32 $0, 0x3c003c00; mov.b32 $1, 0x3c003c00; // $2")
_ONES_BF16 = tl.constexpr("mov.b32 $0, 0x3f803f80; mov.b32 $1, 0x3f803f80; // $2")


@dataclass(frozen=True)
class GemvConfig:
    """What a program of the kernel does, and how often K is split.

    block_n: rows of a program, a multiple of 16. warps: how many share each step along K.
    stages: of the software pipeline. splits: programs along K.
    registers: of a thread at most; 0 leaves it to the compiler.
    """

    block_n: int = 32
    warps: int = 4
    stages: int = 3
    splits: int = 1
    registers: int = 168


@triton.jit
def _ones(codes, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """A tile of ones of the shape of `codes` (uint8), in the layout of the codes."""
    if ASM:
        if tl.float16 == DTYPE:
            ones = tl.inline_asm_elementwise(
                _ONES_F16, "=r,=r,r", [codes], dtype=tl.float16, is_pure=True, pack=4
            )
        else:
            ones = tl.inline_asm_elementwise(
                _ONES_BF16, "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4
            )
    else:
        ones = tl.full(codes.shape, 1.0, DTYPE)
    return ones


@triton.jit
def _group_sums(codes, first, second, BITS: tl.constexpr, ASM: tl.constexpr):
    """Sums over groups of (offset + code) * x, and of x; `second` is x of the high nibbles."""
    SHAPE: tl.constexpr = [codes.shape[0], codes.shape[1], first.shape[2]]
    zero = tl.zeros(SHAPE, tl.float32)
    ones = _ones(codes, first.dtype, ASM)
    x_sum = dot16(ones, first, zero, ASM)
    if BITS == 4:
        low, high = low_high(codes, first.dtype, ASM, True)
        code_sum = dot16(low, first, zero, ASM)
        code_sum = dot16(high, second, code_sum, ASM)
        x_sum = dot16(ones, second, x_sum, ASM)
    else:
        code_sum = dot16(byte_values(codes, first.dtype, ASM), first, zero, ASM)
    return code_sum, x_sum


@triton.jit
def gemv_sums(
    x,
    codes,
    scale_min,
    row,  # [BLOCK_N], those from N on are read as the last one
    M,
    N,
    row_bytes,  # of the codes of a row
    x_stride,
    start,  # first piece of GROUPS groups along K
    steps,
    TOKENS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_BYTES: tl.constexpr,
    BITS: tl.constexpr,
    WARPS: tl.constexpr,
    COLS: tl.constexpr,
    EVEN: tl.constexpr,
    STAGES: tl.constexpr,
    ASM: tl.constexpr,
):
    """Rows of W times up to TOKENS rows of x: float32 [BLOCK_N, COLS // GROUPS].

    GROUPS groups for each of WARPS in a step. Column c of a product is token c // GROUPS and group
    c % GROUPS of the step.
    """
    BLOCK_N: tl.constexpr = row.shape[0]
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
    used = token < tl.minimum(TOKENS, M)

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
    for step in tl.range(0, steps, num_stages=STAGES):
        done = step * (WARPS * BYTES)
        if EVEN:
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
        code_sum, x_sum = _group_sums(packed, first, second, BITS, ASM)
        total += code_sum * scale
        total += x_sum * (minimum - OFFSET * scale)

    tokens = tl.reshape(tl.sum(total, axis=0), (BLOCK_N, COLS // GROUPS, GROUPS))
    return tl.sum(tokens, axis=2)  # [BLOCK_N, tokens]


@triton.jit(do_not_specialize=["M", "steps"])
def gemv_kernel(
    x,
    codes,
    scale_min,
    bias,
    out,  # [M, N], or float32 [splits, M, N] of partial sums
    M,
    N,
    row_bytes,  # of the codes of a row
    x_stride,
    steps,  # of a program along K
    TOKENS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_BYTES: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WARPS: tl.constexpr,
    COLS: tl.constexpr,
    BIAS: tl.constexpr,
    PARTIAL: tl.constexpr,
    EVEN: tl.constexpr,
    STAGES: tl.constexpr,
    ASM: tl.constexpr,
):
    """Rows program_id(0) * BLOCK_N .. of y, part program_id(1) of K; see `gemv_sums`."""
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    y = gemv_sums(
        x,
        codes,
        scale_min,
        row,
        M,
        N,
        row_bytes,
        x_stride,
        tl.program_id(1) * steps * WARPS,
        steps,
        TOKENS,
        GROUPS,
        GROUP_BYTES,
        BITS,
        WARPS,
        COLS,
        EVEN,
        STAGES,
        ASM,
    )
    which = tl.arange(0, COLS // GROUPS)
    keep = (row < N)[:, None] & (which < tl.minimum(TOKENS, M))[None, :]
    if BIAS:
        y += tl.load(bias + tl.minimum(row, N - 1)).to(tl.float32)[:, None]
    target = out + which[None, :].to(tl.int64) * N + row[:, None]
    if PARTIAL:
        target += tl.program_id(1).to(tl.int64) * M * N
    tl.store(target, y.to(out.dtype.element_ty), mask=keep)


def tokens_max(group_bytes: int) -> int:
    """How many tokens pay for groups of `group_bytes` of codes: each group is scaled by itself."""
    return 16 if group_bytes >= STEP_BYTES_MIN else 4


def groups_per_step(tokens: int, group_bytes: int) -> int:
    """Groups of a row that a warp takes in a step: as columns and STEP_BYTES allow."""
    return max(1, min(COLUMNS // tokens, STEP_BYTES // group_bytes))


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


def gemv(
    x: Tensor, weight: QTensor, bias: Tensor | None = None, config: GemvConfig | None = None
) -> Tensor:
    """x @ W.T + bias for up to `tokens_max` rows of x; operands as `w4_linear` takes them."""
    bits, group, (n, k) = weight.bits, weight.group_size, weight.shape
    group_bytes, row_bytes = group * bits // 8, weight.codes.shape[1]
    tokens = triton.next_power_of_2(x.shape[0])
    config = config or _configured(x.device, x.dtype, bits, group, tokens, n, k)
    step = groups_per_step(tokens, group_bytes) * group_bytes * config.warps * config.splits
    steps = triton.cdiv(row_bytes, step)
    even = steps * step == row_bytes
    fixed = constants(config, tokens, group_bytes, bits, even, bias is not None)
    grid = (triton.cdiv(n, config.block_n), config.splits)
    return multiply(gemv_kernel, grid, x, weight, bias, steps, fixed, config)


@cache
def _configured(
    device: torch.device, dtype: torch.dtype, bits: int, group: int, tokens: int, n: int, k: int
) -> GemvConfig:
    entry = tuned.lookup("w4_gemv", device, f"{str(dtype)[6:]}-{bits}-{group}-{tokens}-{n}x{k}")
    if entry:
        return GemvConfig(**entry)
    return choose(tokens, n, k * bits // 8, group * bits // 8, Gpu.of(device))


@cache
def constants(
    config: GemvConfig, tokens: int, group_bytes: int, bits: int, even: bool, bias: bool
) -> dict[str, int | bool]:
    """The constants of `gemv_kernel` but ASM."""
    return {
        "TOKENS": tokens,
        "GROUPS": groups_per_step(tokens, group_bytes),
        "GROUP_BYTES": group_bytes,
        "BITS": bits,
        "BLOCK_N": config.block_n,
        "WARPS": config.warps,
        "COLS": max(COLUMNS, tokens),
        **ends(config, even, bias),
    }
