"""Gated short convolutions (LFM2): a layer remembers the inputs of the newest tokens alone.

A token's b, c and x come of one matrix. Each channel of b * x goes through a causal convolution,
`taps` tokens wide; the result is multiplied by c.
"""

from __future__ import annotations

from dataclasses import dataclass

from qoff.errors import OpError


@dataclass(frozen=True)
class ShortConvShape:
    """Sizes of one layer. Raises OpError for what no kernel has."""

    channels: int
    taps: int  # tokens that the convolution sees

    def __post_init__(self) -> None:
        if self.channels < 16 or self.channels % 16 or self.taps < 2:
            raise OpError(
                f"a short convolution of {self.channels} channels and {self.taps} taps; use a "
                "multiple of 16 channels, and 2 taps or more"
            )

    @property
    def width(self) -> int:
        """Numbers of a token: b, c and x."""
        return 3 * self.channels

    @property
    def operands(self) -> int:
        """See `states.StateShape`."""
        return sum(self.projections)

    @property
    def projections(self) -> tuple[int, ...]:
        """See `states.StateShape`."""
        return (self.width,)

    @property
    def values(self) -> int:
        """Channels of the output."""
        return self.channels

    @property
    def conv_shape(self) -> tuple[int, int]:
        """Of b * x of the newest tokens, oldest first."""
        return self.taps - 1, self.channels

    @property
    def memory_shape(self) -> tuple[int, ...]:
        """There is nothing else."""
        return (0,)

    @property
    def state_bytes(self) -> int:
        """What a sequence takes in a layer."""
        return 4 * (self.taps - 1) * self.channels
