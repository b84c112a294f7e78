"""Quantizing whole matrices, a chunk of rows at a time, and how that is configured."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qoff.errors import OpError, QuantizationError
from qoff.kernels.packing import (
    BITS,
    GROUP_SIZES,
    PACKINGS,
    ROW_BLOCK,
    pack_codes,
    pack_scale_min,
    packed_shapes,
)
from qoff.kernels.qtensor import QTensor
from qoff.kernels.reference import nearest_levels

from .solvers import SOLVERS

_CHUNK = 1 << 17  # weights solved at a time: temporaries of half a MiB stay in cache
_MAX_CHUNK = 1 << 19  # a dozen float32 temporaries of this many weights are below 32 MiB


@dataclass(frozen=True)
class QuantConfig:
    """How the weights of a model are quantized. Raises QuantizationError for a bad value."""

    bits: int = 4
    group_size: int = 64
    solver: str = "hqq"
    head_bits: int = 8  # of the embedding and the head
    packing: str = "half32"
    scale_dtype: torch.dtype = torch.float16

    def __post_init__(self) -> None:
        for name, allowed in _ALLOWED.items():
            if (value := getattr(self, name)) not in allowed:
                raise QuantizationError(
                    f"{name} {value!r} is not supported; use one of {', '.join(map(str, allowed))}"
                )


_ALLOWED = {
    "bits": BITS,
    "head_bits": BITS,
    "group_size": GROUP_SIZES,
    "solver": tuple(SOLVERS),
    "packing": tuple(PACKINGS),
    "scale_dtype": (torch.float16, torch.float32),
}


def quantize(
    w: Tensor,
    bits: int = 4,
    group_size: int = 64,
    solver: str = "hqq",
    packing: str = "half32",
    scale_dtype: torch.dtype = torch.float16,
    row_chunk: int | None = None,
    name: str = "weight",
) -> QTensor:
    """Quantize a matrix [N, K] of any float dtype.

    Works in chunks of `row_chunk` rows (a multiple of 16; by default chosen for the cache), with
    temporaries below 32 MiB. `name` is what errors call the matrix. Raises QuantizationError for
    NaN, infinity, a format that does not exist, a group that does not divide K, or a range that
    `scale_dtype` cannot hold.
    """
    config = QuantConfig(bits, group_size, solver, packing=packing, scale_dtype=scale_dtype)
    if w.ndim != 2 or not w.is_floating_point():
        raise QuantizationError(
            f"{name}: only a matrix of floats can be quantized, not {w.dtype} {tuple(w.shape)}"
        )
    n, k = w.shape
    try:
        codes_shape, scale_min_shape = packed_shapes((n, k), bits, group_size, packing)
        codes = torch.empty(codes_shape, dtype=torch.uint8, device=w.device)
        scale_min = torch.empty(scale_min_shape, dtype=scale_dtype, device=w.device)
        out = QTensor(codes, scale_min, (n, k), bits, group_size, packing)
        rows = max(1, min(row_chunk or _CHUNK // k, _MAX_CHUNK // k) // ROW_BLOCK) * ROW_BLOCK
        for start in range(0, n, rows):
            _quantize_rows(w[start : start + rows], out, config, start)
    except (OpError, QuantizationError) as error:
        raise QuantizationError(f"{name}: {error}") from error
    return out


@torch.inference_mode()
def _quantize_rows(w: Tensor, out: QTensor, config: QuantConfig, start: int) -> None:
    """Quantize a few rows into those of `out` from `start` on, a multiple of 16."""
    n, k = w.shape
    groups = w.float().reshape(n, k // config.group_size, config.group_size)
    scale, minimum = SOLVERS[config.solver](groups, config.bits, config.scale_dtype)
    codes = nearest_levels(groups, scale, minimum, config.bits).to(torch.uint8)
    packed = pack_codes(codes.view(n, k), config.bits, config.packing)
    scale_min = pack_scale_min(scale, minimum, config.packing)
    if config.packing == "half32":
        out.codes[start : start + n] = packed
        out.scale_min[:, start : start + n] = scale_min
    else:
        block = start // ROW_BLOCK
        out.codes[block : block + len(packed)] = packed
        out.scale_min[block : block + len(packed)] = scale_min
