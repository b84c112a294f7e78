"""What the kernels of a quantized matmul share: how they are compiled, launched, and end."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qoff.kernels.layout.qtensor import QTensor
from qoff.kernels.triton.launch import tuned
from qoff.kernels.triton.launch.gpu import Gpu
from qoff.kernels.triton.launch.options import LAUNCH

from .nibbles import use_asm

SPLITS_MAX = 16
# Where K is split and no configuration was measured: rows and tokens of a program at most, bytes of
# codes of a row at least.
_ROWS, SUMS_TOKENS, SUMS_BYTES = 128, 128, 128
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
    activation: str = ""  # of experts' gate and up
    tokens: int = 1
    partial: bool = False  # a program along K writes its sums for itself
    asm: bool = field(default_factory=use_asm)


form = cache(Form)


@triton.jit
def write(y, row, token, tokens, part, bias, out, M, N, FORM: tl.constexpr):
    """Write y [rows, tokens] with the bias to out [M, N], or to float32 out [parts, M, N]."""
    if FORM.bias:
        y += tl.load(bias + tl.minimum(row, N - 1)).to(tl.float32)[:, None]
    target = out + token[None, :].to(tl.int64) * N + row[:, None]
    if FORM.partial:
        target += part.to(tl.int64) * M * N
    keep = (row < N)[:, None] & (token < tokens)[None, :]
    tl.store(target, y.to(out.dtype.element_ty), mask=keep)


@triton.jit
def add_splits_kernel(
    partial, bias, out, size, N, SPLITS: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr
):
    """out = bias + the sum of SPLITS partial results of `size` = M * N elements each."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < size
    total = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(partial + split * size + index, mask=inside, other=0.0)
    if BIAS:
        total += tl.load(bias + index % N, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + index, total.to(out.dtype.element_ty), mask=inside)


def multiply(
    kernel: Any,
    grid: tuple[int, ...],
    x: Tensor,
    weight: QTensor,
    bias: Tensor | None,
    config: Config,
    step: int,
    tokens: int = 1,
    groups: int = 1,
) -> Tensor:
    """Launch `kernel`, and add the parts that programs along K made: [M, N] in the dtype of x.

    step: bytes of a row that a program takes at once. tokens, groups: see `Form`.
    """
    (n, row_bytes), bits, splits = weight.codes.shape, weight.bits, config.splits
    out = x.new_empty(len(x), n)
    target, steps = out, triton.cdiv(row_bytes, step * splits)
    if splits > 1:
        target = x.new_empty(splits, len(x), n, dtype=torch.float32)
        config = replace(config, splits=1)  # one form for every number of programs
    even, with_bias = steps * step * splits == row_bytes, bias is not None and splits == 1
    group_bytes = weight.group_size * bits // 8
    kernel[grid](
        x,
        weight.codes,
        weight.scale_min,
        bias,
        target,
        len(x),
        n,
        row_bytes,
        x.stride(0),
        steps,
        FORM=form(
            config, bits, group_bytes, even, with_bias, groups, tokens=tokens, partial=splits > 1
        ),
        **config.options,
    )
    if splits > 1:
        add_splits(target, bias, out)
    return out


def add_splits(partial: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """out [M, N] = bias [N] + the sum of float32 partial [splits, M, N], in their order."""
    add_splits_kernel[(triton.cdiv(out.numel(), _BLOCK),)](
        partial,
        bias,
        out,
        out.numel(),
        out.shape[1],
        SPLITS=len(partial),
        BIAS=bias is not None,
        BLOCK=_BLOCK,
        num_warps=2,
        num_stages=3,
        **LAUNCH,
    )


def sums_bytes(tokens: int, n: int, k: int, device: torch.device) -> int:
    """The most bytes that `multiply` allocates beside its result for up to `tokens` rows of x.

    K is split until there are two programs for each processor, or as was measured to be fastest.
    """
    wanted = 2 * Gpu.of(device).processors // triton.cdiv(n, _ROWS)
    splits = min(SPLITS_MAX, wanted, k // SUMS_BYTES)
    sums = [splits * min(tokens, SUMS_TOKENS) * n if splits > 1 else 0]
    for op in ("w4_gemv", "w4_skinny", "w4_gemm"):
        for key, entry in tuned.entries(op, device).items():
            if key.endswith(f"-{n}x{k}") and entry.get("splits", 1) > 1:
                sums.append(entry["splits"] * min(tokens, int(key.split("-")[3])) * n)
    return 4 * max(sums)
