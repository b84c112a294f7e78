"""Ops of recurrent layers, as their kernels are compiled for each architecture."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch

from bench.variants.attention import cache_of
from bench.variants.variant import DTYPES, TENSOR_CORES, Variant, empty, float_types
from qoff.kernels.layout.delta import DeltaShape, DeltaWeights
from qoff.kernels.layout.kv_format import KVFormat
from qoff.kernels.layout.mamba import MambaShape, MambaWeights
from qoff.kernels.layout.short_conv import ShortConvShape
from qoff.kernels.layout.states import DeviceLayerStates, StateShape
from qoff.kernels.triton.recurrent.delta import delta
from qoff.kernels.triton.recurrent.mamba import mamba
from qoff.kernels.triton.recurrent.short_conv import short_conv

_SHAPES = (  # of Qwen3-Next and Qwen3.5, with fewer heads of values; one that is padded; OLMo's
    DeltaShape(16, 16, 128, 128, 4),
    DeltaShape(3, 6, 48, 96, 4),
    DeltaShape(16, 32, 128, 128, 4),
    DeltaShape(30, 30, 96, 192, 4, learns=2.0),
)
_KDA_SHAPES = (  # one that is padded; of Kimi Linear and Ling 3
    DeltaShape(3, 3, 48, 96, 4, by_channel=True),
    DeltaShape(32, 32, 128, 128, 4, by_channel=True),
    DeltaShape(32, 32, 128, 128, 4, by_channel=True, floor=-5.0),
)
_KERNELS = {
    "delta_convolve_kernel": (1, 4096),
    "delta_recur_kernel": (1, 4096),
    "delta_solve_kernel": (4096,),
    "delta_chunk_kernel": (4096,),
    "gated_norm_kernel": (1, 4096),
}
_KDA_KERNELS = {
    "delta_recur_kernel": (1, 4096),
    "kda_fade_kernel": (4096,),
    "kda_products_kernel": (4096,),
    "kda_solve_kernel": (4096,),
    "kda_chunk_kernel": (4096,),
    "gated_norm_kernel": (1, 4096),
}
_MAMBA_SHAPES = (  # one that is padded; of Granite 4 Tiny, Nemotron 3 Nano and Falcon H1 7B
    MambaShape(4, 48, 2, 80, 3),
    MambaShape(48, 64, 1, 128, 4),
    MambaShape(64, 64, 8, 128, 4),
    MambaShape(24, 128, 1, 256, 4, factors=(0.4, 0.5, 0.6, 0.7, 0.8)),
)
_MAMBA_KERNELS = {
    "mamba_convolve_kernel": (1, 4096),
    "mamba_recur_kernel": (1, 4096),
    "mamba_chunk_kernel": (4096,),
    "gated_norm_kernel": (1, 4096),
}
_CONVOLUTIONS = (ShortConvShape(2048, 3), ShortConvShape(1040, 4))  # of LFM2; and one in parts
_CHUNKED = (
    *("delta_solve_kernel", "delta_chunk_kernel", "mamba_chunk_kernel"),
    *("kda_fade_kernel", "kda_products_kernel", "kda_solve_kernel", "kda_chunk_kernel"),
)
_FORGETTING = ("delta_recur_kernel", "kda_fade_kernel")  # which read a floor
_WITHOUT_PRODUCTS = ("kda_fade_kernel", "kda_solve_kernel")


def variants(capability: int) -> Iterator[Variant]:
    """Steps of decoding, and prompts: on Turing token by token, as it has no tensor cores here."""
    types = float_types(capability)
    ops: tuple[tuple[Mapping[str, tuple[int, ...]], Sequence[Any], Callable[..., Variant]], ...]
    ops = (
        *((_KERNELS, _SHAPES, _delta), (_KDA_KERNELS, _KDA_SHAPES, _delta)),
        (_MAMBA_KERNELS, _MAMBA_SHAPES, _mamba),
    )
    for kernels, shapes, build in ops:
        for kernel, rows in kernels.items():
            chunked = kernel in _CHUNKED
            if chunked and capability < 80:
                continue
            for shape, count, dtype in product(shapes, rows, types):
                if getattr(shape, "floor", 0.0) and kernel not in _FORGETTING:
                    continue  # as of another shape
                yield build(kernel, shape, count, dtype, chunked)
    for convolution in _CONVOLUTIONS:
        for count in (1, 4096):
            for dtype in types:
                yield _convolution(convolution, count, dtype)


def _delta(kernel: str, shape: DeltaShape, rows: int, dtype: str, chunked: bool) -> Variant:
    states = _states(shape, rows, dtype)
    sizes = (shape.taps * shape.channels, shape.value_heads, shape.decays, shape.value_dim)
    weights = DeltaWeights(*(empty(torch.float32, size) for size in sizes))
    widths = (shape.channels, shape.values, shape.value_heads, shape.decays)
    qkv, z, b, a = (empty(DTYPES[dtype], rows, width) for width in widths)
    launch = partial(delta, qkv, z, b, a, weights, shape, states, chunked=chunked)
    name = ("kda-" if shape.by_channel else "") + kernel.removesuffix("_kernel")
    name = name.replace("delta_", "").replace("kda_", "")
    name += f"-{dtype}-{shape.value_heads}x{shape.key_dim}x{shape.value_dim}-{rows}rows"
    name += "-floor" if shape.floor else ""
    traits = frozenset({TENSOR_CORES} if chunked and kernel not in _WITHOUT_PRODUCTS else ())
    return Variant("delta", name, kernel, launch, traits)


def _mamba(kernel: str, shape: MambaShape, rows: int, dtype: str, chunked: bool) -> Variant:
    sizes = (shape.taps * shape.channels, shape.channels, *[shape.heads] * 3, shape.values)
    weights = MambaWeights(*(empty(torch.float32, size) for size in sizes))
    if set(shape.factors) != {1.0}:  # as in Falcon H1
        weights = replace(weights, norm=None)
    launch = partial(
        mamba,
        empty(DTYPES[dtype], rows, shape.width),
        weights,
        shape,
        _states(shape, rows, dtype),
        chunked=chunked,
    )
    name = kernel.removeprefix("mamba_").removesuffix("_kernel")
    name += f"-{dtype}-{shape.heads}x{shape.head_dim}x{shape.state}-{rows}rows"
    traits = frozenset({TENSOR_CORES} if chunked else ())
    return Variant("mamba", name, kernel, launch, traits)


def _convolution(shape: ShortConvShape, rows: int, dtype: str) -> Variant:
    launch = partial(
        short_conv,
        empty(DTYPES[dtype], rows, shape.width),
        empty(torch.float32, shape.taps * shape.channels),
        shape,
        _states(shape, rows, dtype),
    )
    name = f"{dtype}-{shape.channels}x{shape.taps}-{rows}rows"
    return Variant("short_conv", name, "short_conv_kernel", launch)


def _states(shape: StateShape, rows: int, dtype: str) -> DeviceLayerStates:
    step = cache_of(KVFormat(64), dtype, rows).step
    slots = len(step.start)
    return DeviceLayerStates(
        empty(torch.float32, slots, *shape.conv_shape),
        empty(torch.float32, slots, *shape.memory_shape),
        step,
    )
