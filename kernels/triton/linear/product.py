"""What the kernels of a quantized matmul share: how they are compiled, launched, and end."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from qoff.kernels.layout.qtensor import QTensor
from qoff.kernels.triton.elementwise.gated_silu import gated_silu
from qoff.kernels.triton.launch import tuned
from qoff.kernels.triton.launch.bound import BoundKernel
from qoff.kernels.triton.launch.gpu import Gpu
from qoff.kernels.triton.launch.options import LAUNCH, use_asm
from qoff.kernels.triton.launch.overlap import (
    let_next_begin,
    overlap_options,
    overlaps,
    wait_for_earlier,
)
from qoff.kernels.triton.launch.sizes import cdiv

SPLITS_MAX = 16
TURN = tl.constexpr(16)  # rows of gate, then as many of up
# Where K is split and no configuration was measured: tokens of a program at most, bytes of codes of
# a row at least, and, were they of 32 rows, programs for each processor at most.
SUMS_TOKENS, SUMS_BYTES, _PROGRAMS = 128, 128, 8
_BLOCK = 256  # elements that a program adds up


@dataclass(frozen=True)
class Config:
    """How a kernel on tensor cores runs.

    warps: of a program. stages: of the software pipeline. splits: programs along K. registers: of a
    thread at most; 0 leaves it to the compiler.
    """

    warps: int = 4
    stages: int = 3
    splits: int = 1
    registers: int = 168

    @property
    def options(self) -> dict[str, Any]:
        """Of the compiler; the cap on registers is above what it would choose by itself."""
        options = {"num_warps": self.warps, "num_stages": self.stages, **LAUNCH}
        return {**options, "maxnreg": self.registers} if self.registers else options


@dataclass(frozen=True)
class Form:
    """What a kernel is compiled for, beside the dtypes of its operands."""

    config: Any  # of the kernel, without `splits`
    bits: int
    group_bytes: int  # of codes that share a scale
    even: bool  # the steps of a program end where a row does
    bias: bool
    groups: int = 1  # that a warp takes in a step
    activation: str = ""  # of gate and up, whose rows alternate in blocks of TURN, or of each row
    gated: bool = True  # which of these
    limit: float = 0.0  # of gate and up, in a mixture of experts
    tokens: int = 1
    partial: bool = False  # a program along K writes its sums for itself
    residual: bool = False
    aligned: bool = False  # W has a multiple of TURN rows
    whole: bool = False  # and of those of a program
    wgmma: bool = False  # the GPU multiplies by it
    overlap: bool = False  # it begins before those before it have ended
    asm: bool = field(default_factory=use_asm)


form = cache(Form)


def has_wgmma(device: torch.device) -> bool:
    """Whether kernels for the GPU `device` multiply by Hopper's `wgmma`."""
    return use_asm() and Gpu.of(device).capability == 90


class Epilogue(NamedTuple):
    """What is done to a product [M, N] before it is written, and where that goes.

    silu_mul: silu(gate) * up, [M, N / 2] (see `elementwise.gated_silu`). residual: added then; like
    the result. out: where the result goes, None for a tensor of its own; may be the residual.
    """

    residual: Tensor | None = None
    silu_mul: bool = False
    out: Tensor | None = None

    def target(self, x: Tensor, weight: QTensor) -> Tensor:
        """Where the result of x times `weight` goes."""
        if self.out is not None:
            return self.out
        rows = weight.shape[0]
        return x.new_empty(x.shape[0], rows // 2 if self.silu_mul else rows)


PLAIN = Epilogue()


def ended(y: Tensor, end: Epilogue) -> Tensor:
    """What `end` says of a product y that is there without it."""
    if end.silu_mul:
        y = gated_silu(y)
    if end.residual is not None:
        return torch.add(y, end.residual, out=end.out)
    return y if end.out is None else end.out.copy_(y)


class Case(NamedTuple):
    """What decides how a product and its epilogue are launched."""

    device: torch.device
    dtype: torch.dtype
    bits: int
    group: int
    m: int
    n: int
    k: int
    bias: bool
    residual: bool
    silu_mul: bool

    @staticmethod
    def of(x: Tensor, weight: QTensor, bias: Tensor | None, end: Epilogue) -> Case:
        shape = (x.shape[0], *weight.shape)
        flags = (bias is not None, end.residual is not None, end.silu_mul)
        return Case(x.device, x.dtype, weight.bits, weight.group_size, *shape, *flags)


@triton.jit
def rows_of(program, BLOCK_N: tl.constexpr, FORM: tl.constexpr):
    """The rows of W of a program; where they are activated, half of them gate, then as many up."""
    index = tl.arange(0, BLOCK_N)
    row = program * BLOCK_N + index
    if FORM.activation != "":
        HALF: tl.constexpr = BLOCK_N // 2
        column = program * HALF + index % HALF
        row = column // TURN * (2 * TURN) + index // HALF * TURN + column % TURN
        RUN: tl.constexpr = min(TURN, HALF)  # rows side by side, which the compiler does not see
        row = tl.max_contiguous(tl.multiple_of(row, RUN), RUN)
    return row


@triton.jit
def activated(y):
    """silu(gate) * up of y [2 * ROWS, COLS], gate before up."""
    ROWS: tl.constexpr = y.shape[0] // 2
    both = tl.reshape(y, (2, ROWS, y.shape[1]))
    is_gate = (tl.arange(0, 2) == 0)[:, None, None]
    gate = tl.sum(tl.where(is_gate, both, 0.0), axis=0)
    up = tl.sum(tl.where(is_gate, 0.0, both), axis=0)
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def write(y, row, token, tokens, part, bias, residual, out, M, N, FORM: tl.constexpr):
    """Write y [rows, tokens], finished, to out [M, N or N / 2], or to float32 out [parts, M, N].

    row: see `rows_of`; of program_id(0).
    """
    let_next_begin(FORM.overlap)
    if FORM.bias:
        y += tl.load(bias + tl.minimum(row, N - 1)).to(tl.float32)[:, None]
    column = row
    columns = N
    if FORM.activation != "":
        HALF: tl.constexpr = y.shape[0] // 2
        y = activated(y)
        column = tl.program_id(0) * HALF + tl.arange(0, HALF)
        columns = N // 2
    at = token[None, :].to(tl.int64) * columns + column[:, None]
    keep = (column < columns)[:, None] & (token < tokens)[None, :]
    if FORM.residual:
        y += tl.load(residual + at, mask=keep, other=0.0).to(tl.float32)
    if FORM.partial:
        at += part.to(tl.int64) * M * N
    tl.store(out + at, y.to(out.dtype.element_ty), mask=keep)


@triton.jit
def _add_parts(partial, bias, at, inside, size, N, SPLITS: tl.constexpr, BIAS: tl.constexpr):
    """The sums and biases of the elements `at` [BLOCK] of a product, in the order of the parts."""
    total = tl.zeros(at.shape, tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(partial + split * size + at, mask=inside, other=0.0)
    if BIAS:
        total += tl.load(bias + at % N, mask=inside, other=0.0).to(tl.float32)
    return total


@triton.jit
def add_splits_kernel(
    partial, bias, residual, out, size, N, SPLITS: tl.constexpr, BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr, SILU: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """out = f(bias + the sum of SPLITS partial results of `size` = M * N elements each) + residual.

    f: with SILU silu(gate) * up, otherwise nothing.
    """
    wait_for_earlier(OVERLAP)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if SILU:
        inside = index < size // 2
        column = index % (N // 2)
        at = index // (N // 2) * N + column // TURN * (2 * TURN) + column % TURN
        gate = _add_parts(partial, bias, at, inside, size, N, SPLITS, BIAS)
        up = _add_parts(partial, bias, at + TURN, inside, size, N, SPLITS, BIAS)
        total = gate / (1.0 + tl.exp(-gate)) * up
    else:
        inside = index < size
        total = _add_parts(partial, bias, index, inside, size, N, SPLITS, BIAS)
    let_next_begin(OVERLAP)
    if RESIDUAL:
        total += tl.load(residual + index, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + index, total.to(out.dtype.element_ty), mask=inside)


def splits_for(programs: int, wanted: float, most: int) -> int:
    """Programs along K, a power of two up to `most`: until there are `wanted` in all."""
    splits = 1
    while programs * splits < wanted and 2 * splits <= min(most, SPLITS_MAX):
        splits *= 2
    return splits


class Prepared(NamedTuple):
    """How products with matrices of one shape are launched."""

    kernel: BoundKernel
    grid: tuple[int, int, int]
    steps: int  # of each program along K
    splits: int
    add_splits: BoundKernel


def prepare(
    kernel: Any,
    programs: tuple[int, int],
    config: Any,
    step: int,
    case: Case,
    tokens: int = 1,
    groups: int = 1,
) -> Prepared:
    """How `kernel` is launched.

    programs: along the rows of W and, unless K comes next, of x; those along K follow. step: bytes
    of a row of W that a program takes at once. tokens, groups: see `Form`.
    """
    row_bytes, splits = case.k * case.bits // 8, config.splits
    steps = cdiv(row_bytes, step * splits)
    kernel = BoundKernel(
        kernel,
        FORM=form(
            replace(config, splits=1),  # one form for every number of programs
            case.bits,
            case.group * case.bits // 8,
            steps * step * splits == row_bytes,
            case.bias and splits == 1,
            groups,
            "silu" if case.silu_mul and splits == 1 else "",
            tokens=tokens,
            partial=splits > 1,
            residual=case.residual and splits == 1,
            aligned=case.n % TURN.value == 0,
            whole=case.n % config.block_n == 0,
            wgmma=has_wgmma(case.device),
            overlap=overlaps(case.device),
        ),
        **config.options,
        **overlap_options(case.device),
    )
    added = BoundKernel(
        add_splits_kernel,
        SPLITS=splits,
        BIAS=case.bias,
        RESIDUAL=case.residual,
        SILU=case.silu_mul,
        BLOCK=_BLOCK,
        OVERLAP=overlaps(case.device),
        num_warps=2,
        num_stages=3,
        **overlap_options(case.device),
    )
    return Prepared(kernel, (*programs, splits), steps, splits, added)


def multiply(
    how: Prepared, x: Tensor, weight: QTensor, bias: Tensor | None, end: Epilogue
) -> Tensor:
    """x @ W.T + bias and what `end` says: [M, N] or [M, N / 2] in the dtype of x."""
    m, (n, row_bytes), residual = x.shape[0], weight.codes.shape, end.residual
    out = target = end.target(x, weight)
    splits = how.splits
    if splits > 1:
        target = x.new_empty(splits, m, n, dtype=torch.float32)
    operands = (x, weight.codes, weight.scale_min, bias, residual, target)
    how.kernel(how.grid, *operands, m, n, row_bytes, x.stride(0), how.steps)
    if splits > 1:
        blocks = cdiv(out.numel(), _BLOCK)
        how.add_splits((blocks, 1, 1), target, bias, residual, out, m * n, n)
    return out


def sums_bytes(tokens: int, n: int, k: int, device: torch.device) -> int:
    """The most bytes that `multiply` allocates beside its result for up to `tokens` rows of x.

    K is split until there are enough programs for all processors, or as was measured to be fastest.
    """
    wanted = _PROGRAMS * Gpu.of(device).processors // cdiv(n, 32)
    splits = min(SPLITS_MAX, wanted, k // SUMS_BYTES)
    sums = [splits * min(tokens, SUMS_TOKENS) * n if splits > 1 else 0]
    for op in ("w4_gemv", "w4_skinny", "w4_gemm"):
        for key, entry in tuned.entries(op, device).items():
            if key.endswith(f"-{n}x{k}") and entry.get("splits", 1) > 1:
                sums.append(entry["splits"] * min(tokens, int(key.split("-")[3])) * n)
    return 4 * max(sums)
