"""What a step of an optimizer on the CPU takes of a pool's workspace, in bytes."""

from __future__ import annotations

BLOCK = 256  # moments of 8 bits that share a scale
SCRATCH_BYTES = 2 * 2 * 4 * BLOCK  # of a thread: both moments of two blocks


def update_bytes(threads: int) -> int:
    """`update`, of any number of weights."""
    return threads * SCRATCH_BYTES
