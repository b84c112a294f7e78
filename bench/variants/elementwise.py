"""Norms, gated activations and rotary embedding, as they are compiled for each architecture."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from bench.variants.variant import DTYPES, Variant, empty, float_types
from qoff.kernels.layout.ending import Xielu
from qoff.kernels.triton.elementwise.gated_silu import gated_silu
from qoff.kernels.triton.elementwise.rms_norm import rms_norm
from qoff.kernels.triton.elementwise.rope import rope
from qoff.kernels.triton.elementwise.xielu import xielu

_ROTARY = ((64, 64), (80, 32), (80, 80), (96, 96), (128, 128), (256, 64), (256, 256), (512, 512))
_HEADS = 24  # no multiple of 16


def variants(capability: int) -> Iterator[Variant]:
    """Rows of 64 up to 16384 columns; the activations; rotary widths of each head size. Types
    take turns."""
    types = float_types(capability)
    for i, columns in enumerate((64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)):
        yield _rms_norm(types[i % len(types)], columns)
    for dtype in types:
        z = empty(DTYPES[dtype], 3, 2 * 14336)
        yield Variant("gated_silu", dtype, "gated_silu_kernel", partial(gated_silu, z))
        inner = z[:, :14336].contiguous()
        launch = partial(xielu, inner, Xielu(1.0, 1.0, 0.5, -1e-6))
        yield Variant("xielu", dtype, "xielu_kernel", launch)
    for i, (head_dim, rotary) in enumerate(_ROTARY):
        yield _rope(types[i % len(types)], head_dim, rotary)


def _rms_norm(dtype: str, columns: int) -> Variant:
    x = empty(DTYPES[dtype], 7, columns)
    weight = empty(DTYPES[dtype], columns)
    launch = partial(rms_norm, x, weight, 1e-5)
    return Variant("rms_norm", f"{dtype}-{columns}", "rms_norm_kernel", launch)


def _rope(dtype: str, head_dim: int, rotary: int) -> Variant:
    x = empty(DTYPES[dtype], 3, _HEADS, head_dim)
    table = empty(torch.float32, 9, rotary // 2)
    launch = partial(rope, x, empty(torch.int64, 3), table, table)
    return Variant("rope", f"{dtype}-{head_dim}-{rotary}", "rope_kernel", launch)
