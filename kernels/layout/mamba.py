"""Mamba 2, a state space model: what a layer remembers of a sequence has a fixed size.

A token's z, x, B, C and dt come of one matrix. x, B and C go through a causal convolution of each
channel, `taps` tokens wide, and silu. Each head has a state S [state, head_dim] of float32, which
forgets, and learns x (arXiv 2405.21060):

    t = softplus(dt + dt_bias)
    S = exp(-exp(decay) * t) * S + B (t * x)^T,    y = S^T C + skip * x

`heads / groups` heads that follow each other share B and C. y is multiplied by silu(z); then may
come an RMSNorm of each group's channels. z, x, B, C and dt may have constant factors (Falcon H1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from qoff.errors import OpError


@dataclass(frozen=True)
class MambaShape:
    """Sizes of one layer. Raises OpError for what no kernel has."""

    heads: int
    head_dim: int  # channels of x
    groups: int  # of B and C
    state: int  # channels of B and of C
    taps: int  # tokens that the convolution sees
    norm_eps: float = 1e-5
    factors: tuple[float, float, float, float, float] = (1.0,) * 5  # of z, x, B, C and dt

    def __post_init__(self) -> None:
        if min(self.heads, self.groups) < 1 or self.heads % self.groups or self.taps < 2:
            raise OpError(
                f"Mamba with {self.heads} heads, {self.groups} groups and {self.taps} taps; heads "
                "are a multiple of groups, and there are 2 taps or more"
            )
        if min(self.head_dim, self.state) < 16 or self.head_dim % 16 or self.state % 16:
            raise OpError(
                f"Mamba with heads of {self.head_dim} channels and a state of {self.state}; use "
                "multiples of 16"
            )

    @property
    def values(self) -> int:
        """Channels of x, of z and of the output."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Those that are convolved: x, B, C."""
        return self.values + 2 * self.groups * self.state

    @property
    def width(self) -> int:
        """Numbers of a token: z, x, B, C, dt."""
        return self.values + self.channels + self.heads

    @property
    def operands(self) -> int:
        """See `states.StateShape`."""
        return sum(self.projections)

    @property
    def projections(self) -> tuple[int, ...]:
        """See `states.StateShape`."""
        return (self.width,)

    @property
    def panel(self) -> int:
        """Channels of x whose part of a state lies together."""
        return math.gcd(self.head_dim, 64)

    @property
    def conv_shape(self) -> tuple[int, int]:
        """Of x, B and C of the newest tokens, oldest first."""
        return self.taps - 1, self.channels

    @property
    def memory_shape(self) -> tuple[int, int, int, int]:
        """Of a sequence's states: [heads, panels, state, panel]."""
        return self.heads, self.head_dim // self.panel, self.state, self.panel

    @property
    def state_bytes(self) -> int:
        """What a sequence takes in a layer."""
        return 4 * (math.prod(self.conv_shape) + math.prod(self.memory_shape))


@dataclass(frozen=True, eq=False)
class MambaWeights:
    """Small weights of a layer, float32."""

    conv: Tensor  # [taps * channels], tap by tap, the newest token's last
    conv_bias: Tensor | None  # [channels]
    decay: Tensor  # [heads], A_log
    dt_bias: Tensor  # [heads]
    skip: Tensor  # [heads], D
    norm: Tensor | None  # [values]; None: there is no norm
