"""All variants of all ops."""

from __future__ import annotations

from collections.abc import Iterator

from bench.variants import attention, elementwise, linear, moe
from bench.variants.variant import Variant


def shipped(capability: int) -> Iterator[Variant]:
    """Every variant of every op for a compute capability."""
    for module in (linear, moe, elementwise, attention):
        yield from module.variants(capability)
