"""What launchers tell Triton's compiler, and what depends on its version."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import triton

# Options of every launch. Products and sums become one instruction each: twice the speed where a
# kernel is bound by arithmetic. Triton's default changes from version to version.
LAUNCH: Mapping[str, Any] = MappingProxyType({"enable_fp_fusion": True})

# Where a product's leading dimension is shorter than the number of warps, Triton 3.9 spreads the
# others over rows; 3.6 and 3.7 let them repeat one another's work, in twice the registers.
WARPS_OVER_ROWS = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9)


def use_asm() -> bool:
    """Whether kernels may use inline assembly: everywhere but in Triton's interpreter."""
    return os.environ.get("TRITON_INTERPRET", "0") != "1"
