"""What linear attention on the CPU takes of a pool's workspace, in bytes."""

from __future__ import annotations

from qoff.kernels.layout.delta import DeltaShape


def delta_bytes(threads: int, shape: DeltaShape) -> int:
    """`delta`, of any number of tokens: of each thread what a head's channels had before."""
    group = shape.value_heads // shape.key_heads * shape.value_dim
    return threads * 4 * (shape.taps - 1) * max(shape.key_dim, group)
