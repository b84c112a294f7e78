"""What a step of an optimizer on the CPU takes of a pool's workspace, in bytes."""

from __future__ import annotations

BLOCK = 256  # moments of 8 bits that share a scale
ROOTS_BYTES = 2 * 4 * BLOCK + 64  # of both moments of a block, and factors that make codes of them
SCRATCH_BYTES = 2 * ROOTS_BYTES + 4 * BLOCK  # of a thread: those of two blocks, gradients of one


def update_bytes(threads: int) -> int:
    """`update`, of any number of weights."""
    return threads * SCRATCH_BYTES
