"""The quantized linear op on a GPU: y = x W^T + bias, with W in 4- or 8-bit codes.

One rule, `way`, chooses where nothing was measured (`tuned`). Up to 16 tokens (4 for groups of 32,
2 on Hopper): sums over groups of raw codes (`gemv`). Beyond, weights are dequantized in registers:
on Hopper up to GEMM_MAX tokens for `wgmma` (`gemm`), elsewhere up to SKINNY_MAX for `mma.sync`
(`skinny`). More tokens: the matrix is dequantized to a scratch, a piece of rows at a time, for
cuBLAS. Compute capability 7.5, where Triton has no tensor cores: `fma` up to 4 tokens, beyond that
the scratch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType

import torch
from torch import Tensor

from qoff.errors import OpError
from qoff.kernels.layout.qtensor import QTensor
from qoff.kernels.layout.widening import read_bits
from qoff.kernels.operands import FLOATS, require
from qoff.kernels.triton.launch import tuned
from qoff.kernels.triton.launch.gpu import Gpu
from qoff.kernels.triton.launch.sizes import cdiv, next_power_of_2

from .fma import TOKENS_MAX as FMA_MAX
from .fma import FmaConfig, fma
from .gemm import GemmConfig, gemm
from .gemm import choose as choose_gemm
from .gemv import GemvConfig, gemv, tokens_max
from .gemv import choose as choose_gemv
from .product import PLAIN, Epilogue, sums_bytes
from .scratch import Scratch, ScratchConfig, rows_of_piece, through_scratch
from .skinny import SkinnyConfig, skinny
from .skinny import choose as choose_skinny

CUBLAS_BYTES = 64 << 20  # of torch for cuBLAS and cuBLASLt, on GPUs where they get most
SKINNY_MAX = 64  # tokens; beyond, cuBLAS makes up for the detour through the scratch
GEMM_MAX = 512  # tokens, likewise on Hopper
HOPPER_GEMV_MAX = 2  # tokens; from 4 on `gemm` was faster on an H200 in all shapes

Config = FmaConfig | GemvConfig | SkinnyConfig | GemmConfig | ScratchConfig
# The ways that can be tuned, by the name that files of tuned configurations have for them.
TUNED: Mapping[str, type[Config]] = MappingProxyType(
    {
        "w4_gemv": GemvConfig,
        "w4_skinny": SkinnyConfig,
        "w4_gemm": GemmConfig,
        "w4_scratch": ScratchConfig,
    }
)


def w4_linear(
    x: Tensor,
    weight: QTensor,
    bias: Tensor | None = None,
    config: Config | None = None,
    end: Epilogue = PLAIN,
    scratch: Scratch | None = None,
) -> Tensor:
    """Return x @ W.T + bias, accumulated in float32, and what `end` says.

    x: [M, K] float16 or bfloat16 with contiguous rows. weight: W [N, K], packing split32. bias: [N]
    in the dtype of x. Result: [M, N] in the dtype of x, the same bits each time; what is in `end`
    fits it, which is not checked. `config` selects the way too; scratch: where weights are
    dequantized if they are, None for one of its own. Raises OpError.
    """
    n, k = weight.shape
    require("x", x, FLOATS, ("M", k), weight.device, rows_apart=True)
    if weight.packing != "split32":
        raise OpError(f"weights for a GPU are of packing split32, not of {weight.packing}")
    if read_bits(weight.bits, weight.packing) != weight.bits:
        raise OpError(f"codes of {weight.bits} bits are none for a GPU; use weight.for_kernels")
    if bias is not None:
        require("bias", bias, (x.dtype,), (n,), x.device)
    tokens = x.shape[0]
    if tokens == 0:
        return end.target(x, weight)
    if config is None:
        form = x.dtype, weight.bits, weight.group_size
        config = configured(x.device, *form, _rounded(tokens), n, k)
    elif isinstance(config, ScratchConfig):
        scratch = Scratch(config.nbytes)
    if isinstance(config, ScratchConfig):
        return through_scratch(x, weight, bias, end, scratch or Scratch())
    return _WAYS[type(config)](x, weight, bias, config, end)


def _rounded(tokens: int) -> int:
    """As many tokens as configurations are chosen for: up to 64 by powers of two."""
    return next_power_of_2(tokens) if tokens <= 64 else cdiv(tokens, 64) * 64


@cache
def configured(
    device: torch.device, dtype: torch.dtype, bits: int, group: int, tokens: int, n: int, k: int
) -> Config:
    """The configuration, and with it the way: as measured for the next power of two of tokens, or
    as the rules say."""
    key = tuned_key(dtype, bits, group, next_power_of_2(tokens), n, k)
    for op, kind in TUNED.items():
        if entry := tuned.lookup(op, device, key):
            return kind(**entry)
    gpu, group_bytes = Gpu.of(device), group * bits // 8
    kind = way(tokens, group_bytes, gpu.capability)
    if kind in _RULES:
        return _RULES[kind](tokens, n, k * bits // 8, group_bytes, gpu)
    return kind()


def tuned_key(dtype: torch.dtype, bits: int, group: int, tokens: int, n: int, k: int) -> str:
    """Of an entry of a file of tuned configurations."""
    return f"{str(dtype)[6:]}-{bits}-{group}-{tokens}-{n}x{k}"


def way(tokens: int, group_bytes: int, capability: int) -> type[Config]:
    """The rule: which way is taken for a number of tokens, by the type of its configuration."""
    if capability < 80:
        return FmaConfig if tokens <= FMA_MAX else ScratchConfig
    if tokens <= (HOPPER_GEMV_MAX if capability == 90 else tokens_max(group_bytes)):
        return GemvConfig
    if capability == 90:
        return GemmConfig if tokens <= GEMM_MAX else ScratchConfig
    return SkinnyConfig if tokens <= SKINNY_MAX else ScratchConfig


def linear_bytes(
    tokens: int, n: int, k: int, dtype: torch.dtype, device: torch.device, silu_mul: bool = False
) -> int:
    """The most bytes the decoder's op allocates for up to `tokens` rows of x by W [N, K].

    The normalized input, bias, product and gated result, and sums of programs along K; not a
    scratch, nor what cuBLAS takes for itself, `CUBLAS_BYTES`.
    """
    values = tokens * (n + k) + n + tokens * n // 2 * silu_mul
    return values * dtype.itemsize + sums_bytes(tokens, n, k, device)


def scratch_bytes(tokens: int, n: int, k: int, device: torch.device, piece: int) -> int:
    """Bytes of the pieces of W [N, K] in a scratch; 0 where up to `tokens` rows need none."""
    return rows_of_piece(n, k, piece) * k * 2 if takes_scratch(tokens, n, k, device) else 0


def takes_scratch(tokens: int, n: int, k: int, device: torch.device) -> bool:
    """Whether some number of tokens up to `tokens` may be computed through the scratch."""
    some = (min(tokens, 16), tokens)
    ruled = ScratchConfig in (way(m, 32, Gpu.of(device).capability) for m in some)
    return ruled or any(key.endswith(f"-{n}x{k}") for key in tuned.entries("w4_scratch", device))


_WAYS: dict[type[Config], Callable[..., Tensor]] = {
    FmaConfig: fma,
    GemvConfig: gemv,
    SkinnyConfig: skinny,
    GemmConfig: gemm,
}
_RULES: dict[type[Config], Callable[[int, int, int, int, Gpu], Config]] = {
    GemvConfig: choose_gemv,
    SkinnyConfig: choose_skinny,
    GemmConfig: choose_gemm,
}
