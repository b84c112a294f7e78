"""One compiled form of a Triton kernel, described well enough to compile it without a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from types import MappingProxyType
from typing import Any

import triton

# What the artefacts of a variant are asked to show; tests/kernels/test_compile.py looks.
TENSOR_CORES = "tensor cores"  # mma.sync or wgmma (tcgen05 on sm_100)
WIDE_CODES = "wide codes"  # 128-bit global loads (or asynchronous copies) of codes
NO_SHARED_IN_LOOP = "no shared memory in the loop"  # no layout conversion through shared memory

# Options of every launch. Products and sums become one instruction each: twice the speed where a
# kernel is bound by arithmetic. Triton's default changes from version to version.
LAUNCH: Mapping[str, Any] = MappingProxyType({"enable_fp_fusion": True})

# Where a product's leading dimension is shorter than the number of warps, Triton 3.9 spreads the
# others over rows; 3.6 and 3.7 let them repeat one another's work, in twice the registers.
WARPS_OVER_ROWS = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9)


@dataclass(frozen=True)
class Variant:
    """A kernel with the types, constants and options that its launcher would compile it with."""

    op: str
    name: str  # of the variant, unique within the op
    kernel: Any  # the function under @triton.jit
    types: Mapping[str, str]  # Triton type of each argument that is not a constant: "*fp16", "i32"
    constants: Mapping[str, Any]  # the tl.constexpr arguments
    num_warps: int
    num_stages: int
    unaligned: frozenset[str] = frozenset()  # pointers and strides that are not multiples of 16
    traits: frozenset[str] = frozenset()
    options: Mapping[str, Any] = field(default_factory=lambda: LAUNCH)  # others


MODULES = (  # in qoff.kernels.triton, those with `variants`
    "linear.quantize",
    "linear.dequantize",
    "linear.fma",
    "linear.gemv",
    "linear.skinny",
    "linear.split_k",
    "moe.pairs",
    "moe.tiles",
    "moe.experts",
    "elementwise.rms_norm",
    "elementwise.silu_mul",
    "elementwise.interleaved_silu_mul",
    "elementwise.rope",
    "attention.append",
    "attention.merge",
    "attention.decode",
    "attention.prefill_scratch",
    "attention.prefill",
)


def shipped(capability: int) -> Iterator[Variant]:
    """Every variant of every op for a compute capability."""
    for module in MODULES:
        yield from import_module(f"qoff.kernels.triton.{module}").variants(capability)
