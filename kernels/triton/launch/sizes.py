"""Sizes of grids and tiles in plain Python: Triton's own functions take microseconds."""

from __future__ import annotations


def cdiv(x: int, y: int) -> int:
    """The quotient of x >= 0 and y > 0, rounded up."""
    return -(-x // y)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n > 0."""
    return 1 << (n - 1).bit_length()
