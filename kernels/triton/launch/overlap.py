"""Programmatic dependent launch: a kernel begins while those before it still run.

From compute capability 9.0 on. Otherwise a kernel is launched when the last program of the one
before has ended, which at decode, with kernels of a few microseconds, is 6 % of the time (H200).
Programs of a kernel that is launched so call `wait_for_earlier` before they read or write memory.
It has ended only after all before it have, as each of its programs has waited for them: a kernel
that waits for the last one, in whichever way it was launched, waits for all.

Programs call `let_next_begin` when they are nearly done. Were it earlier, programs of several
kernels would wait in places that happened to be free, unevenly over the processors: on an H200
that cost more than it gave, as did asking for weights while they wait.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from .gpu import Gpu
from .options import use_asm

_OPTIONS: Mapping[str, Any] = MappingProxyType({"launch_pdl": True})
_NONE: Mapping[str, Any] = MappingProxyType({})


def overlaps(device: torch.device) -> bool:
    """Whether kernels for the GPU `device` begin before those before them have ended."""
    return use_asm() and Gpu.of(device).capability >= 90


def overlap_options(device: torch.device) -> Mapping[str, Any]:
    """What Triton is told of the launch of a kernel that waits by itself."""
    return _OPTIONS if overlaps(device) else _NONE


@triton.jit
def let_next_begin(OVERLAP: tl.constexpr):
    """Let programs of the next kernel begin when all of this one have."""
    if OVERLAP:
        cuda.gdc_launch_dependents()


@triton.jit
def wait_for_earlier(OVERLAP: tl.constexpr):
    """Wait until all kernels before have ended, and what they wrote can be read."""
    if OVERLAP:
        cuda.gdc_wait()
