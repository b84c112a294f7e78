"""What ops of recurrent layers on the CPU take of a pool's workspace, in bytes."""

from __future__ import annotations

from qoff.kernels.layout.delta import DeltaShape
from qoff.kernels.layout.mamba import MambaShape
from qoff.kernels.layout.short_conv import ShortConvShape
from qoff.kernels.layout.states import StateShape

TOGETHER = 128  # channels that a thread convolves at once


def delta_bytes(threads: int, shape: DeltaShape) -> int:
    """`delta`, of any number of tokens: of each thread what a head's channels had before."""
    group = shape.value_heads // shape.key_heads * shape.value_dim
    return threads * 4 * (shape.taps - 1) * max(shape.key_dim, group)


def conv_bytes(threads: int, shape: ShortConvShape | MambaShape) -> int:
    """`short_conv`, `mamba`, of any number of tokens: of each thread what channels had before."""
    return threads * 4 * (shape.taps - 1) * min(TOGETHER, shape.channels)


def states_bytes(threads: int, shape: StateShape) -> int:
    """The op of a recurrent layer."""
    if isinstance(shape, DeltaShape):
        return delta_bytes(threads, shape)
    assert isinstance(shape, ShortConvShape | MambaShape)
    return conv_bytes(threads, shape)
