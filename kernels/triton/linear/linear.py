"""The quantized linear op on a GPU: y = x W^T + bias, with W in 4- or 8-bit codes.

One rule chooses among three ways: up to 16 tokens (4 for groups of 32), sums over groups of raw
codes (`w4_gemv`); up to SKINNY_MAX, weights dequantized in registers (`w4_skinny`); beyond, the
matrix is dequantized to a scratch, a piece of rows at a time, for cuBLAS. Compute capability 7.5,
where Triton has no tensor cores: `w4_fma` up to 4 tokens, beyond that the scratch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from qoff.kernels.triton.launch.variant import Variant

from . import fma as w4_fma
from . import gemv as w4_gemv
from . import skinny as w4_skinny
from . import split_k
from .dequantize import dequantize_into
from .fma import FmaConfig, fma
from .gemv import GemvConfig, gemv, tokens_max
from .skinny import SkinnyConfig, skinny
from .split_k import Gpu

SKINNY_MAX = 64  # tokens; beyond, cuBLAS makes up for the detour through the scratch


@dataclass(frozen=True)
class ScratchConfig:
    """Dequantize and multiply through a scratch of at most `nbytes` (at least 128 rows)."""

    nbytes: int = 64 << 20


Config = FmaConfig | GemvConfig | SkinnyConfig | ScratchConfig


def w4_linear(
    x: Tensor,
    codes: Tensor,
    scale_min: Tensor,
    bias: Tensor | None,
    bits: int,
    group_size: int,
    config: Config | None = None,
) -> Tensor:
    """Return x @ W.T + bias, accumulated in float32.

    x: [M, K] float16 or bfloat16 with contiguous rows. codes: uint8, packing split32, of W [N, K].
    scale_min: [K/g, N, 2] float16 or float32. bias: [N] in the dtype of x. Result: [M, N] in the
    dtype of x, the same bits each time. `config` selects the way too.
    """
    operands = (x, codes, scale_min, bias, bits, group_size)
    tokens = x.shape[0]
    if tokens == 0:
        return x.new_empty(0, codes.shape[0])
    if config is not None:
        run = next(function for kind, function in _WAYS.items() if isinstance(config, kind))
        return run(*operands, config)
    return _WAYS[way(tokens, group_size * bits // 8, Gpu.of(x.device).capability)](*operands)


def way(tokens: int, group_bytes: int, capability: int) -> type[Config]:
    """The rule: which way is taken for a number of tokens, by the type of its configuration."""
    if capability < 80:
        return FmaConfig if tokens <= w4_fma.TOKENS_MAX else ScratchConfig
    if tokens <= tokens_max(group_bytes):
        return GemvConfig
    return SkinnyConfig if tokens <= SKINNY_MAX else ScratchConfig


def through_scratch(
    x: Tensor,
    codes: Tensor,
    scale_min: Tensor,
    bias: Tensor | None,
    bits: int,
    group_size: int,
    config: ScratchConfig | None = None,
) -> Tensor:
    """x @ W.T + bias by way of pieces of rows of W in the dtype of x."""
    config = config or ScratchConfig()
    n, k = codes.shape[0], x.shape[1]
    rows = min(n, max(128, config.nbytes // (2 * k) // 128 * 128))
    scratch = torch.empty(rows, k, dtype=x.dtype, device=x.device)
    out = torch.empty(x.shape[0], n, dtype=x.dtype, device=x.device)
    for start in range(0, n, rows):
        stop = min(start + rows, n)
        w = scratch[: stop - start]
        dequantize_into(codes[start:stop], scale_min[:, start:stop], bits, group_size, w)
        if bias is None:
            torch.mm(x, w.T, out=out[:, start:stop])
        else:
            torch.addmm(bias[start:stop], x, w.T, out=out[:, start:stop])
    return out


_WAYS: dict[type[Config], Callable[..., Tensor]] = {
    FmaConfig: fma,
    GemvConfig: gemv,
    SkinnyConfig: skinny,
    ScratchConfig: through_scratch,
}


def variants(capability: int) -> Iterator[Variant]:
    """Every shipped configuration of all kernels for a compute capability."""
    yield from w4_fma.variants(capability)
    yield from w4_gemv.variants(capability)
    yield from w4_skinny.variants(capability)
    yield from split_k.variants(capability)
