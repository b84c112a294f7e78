"""Checks and timed cases of one op each, listed in `OPS` by worth."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

# The ops, the most important first, and what part of the time for timing each may take.
SHARES: Mapping[str, float] = MappingProxyType(
    {
        "w4_linear": 0.32,
        "decode_attention": 0.18,
        "prefill_attention": 0.12,
        "latent_attention": 0.04,
        "indexed_attention": 0.02,
        "delta": 0.02,
        "mamba": 0.02,
        "short_conv": 0.01,
        "experts": 0.05,
        "kv_append": 0.05,
        "merge": 0.04,
        "rms_norm": 0.04,
        "gated_silu": 0.02,
        "xielu": 0.01,
        "rope": 0.02,
        "dequantize": 0.02,
        "quantize": 0.01,
        "repack": 0.01,
    }
)
OPS = tuple(SHARES)


def module(op: str) -> Any:
    """The module of an op: `checks(device, tiny)`, `cases(quick, models)`."""
    return importlib.import_module(f"bench.gpu.ops.{op}")
