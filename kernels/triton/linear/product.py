"""What the kernels on tensor cores share: their launch, and how a variant describes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from qoff.kernels.layout.qtensor import QTensor
from qoff.kernels.triton.launch.gpu import Gpu
from qoff.kernels.triton.launch.options import LAUNCH

from .nibbles import use_asm
from .split_k import add_splits, partial_bytes, partial_sums

SPLITS_MAX = 16
_ROWS = 64  # of a program at least, where K is split and no configuration was measured


class Config(Protocol):
    """What the configurations have in common: see `GemvConfig` and `SkinnyConfig`."""

    @property
    def warps(self) -> int: ...
    @property
    def stages(self) -> int: ...
    @property
    def splits(self) -> int: ...
    @property
    def registers(self) -> int: ...


def multiply(
    kernel: Any,
    grid: tuple[int, ...],
    x: Tensor,
    weight: QTensor,
    bias: Tensor | None,
    steps: int,
    constants: Mapping[str, Any],
    config: Config,
) -> Tensor:
    """Launch `kernel` with its `constants` but ASM, and add the parts that programs along K made.

    steps: of a program along K. Returns [M, N] in the dtype of x.
    """
    m, n = x.shape[0], weight.shape[0]
    out = torch.empty(m, n, dtype=x.dtype, device=x.device)
    target = out if config.splits == 1 else partial_sums(config.splits, out)
    kernel[grid](
        x,
        weight.codes,
        weight.scale_min,
        bias,
        target,
        m,
        n,
        weight.codes.shape[1],
        x.stride(0),
        steps,
        **constants,
        ASM=use_asm(),
        num_warps=config.warps,
        num_stages=config.stages,
        **options(config),
    )
    if config.splits > 1:
        add_splits(target, bias, out)
    return out


def sums_bytes(tokens: int, rows: int, gpu: Gpu) -> int:
    """The most bytes that `multiply` allocates beside its result, for the parts of splits.

    K is split until there are two programs for each processor.
    """
    splits = min(SPLITS_MAX, 2 * gpu.processors // -(-rows // _ROWS))
    return partial_bytes(tokens, rows, splits)


def options(config: Config) -> dict[str, Any]:
    """Further options of the compiler: a cap on registers above what it would choose by itself."""
    return {**LAUNCH, "maxnreg": config.registers} if config.registers else {**LAUNCH}


def ends(config: Config, even: bool, bias: bool) -> dict[str, int | bool]:
    """The constants that all these kernels have; even: a program's steps end where a row does."""
    return {
        "BIAS": bias and config.splits == 1,
        "PARTIAL": config.splits > 1,
        "EVEN": even,
        "STAGES": config.stages,
    }
