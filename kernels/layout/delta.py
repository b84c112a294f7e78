"""Gated DeltaNet and KDA, linear attention: what a layer remembers of a sequence has a fixed size.

Queries, keys and values of a token go through a causal convolution of each channel, `taps` tokens
wide, and silu. Each value head has a state S [key_dim, value_dim] of float32, which forgets, and is
corrected by what it gave for the token's key (arXiv 2412.06464):

    S = exp(-exp(decay) * softplus(a + dt)) * S
    S = S + k (sigmoid(b) * (v - S^T k))^T,    o = S^T q

with q and k of length 1, q divided by the root of key_dim; sigmoid(b) times `learns`, 2 where a
state may also turn the sign of what it gives for a key. A key head serves value_heads /
key_heads value heads that follow each other. o goes through an RMSNorm and is multiplied by
silu(z).

Kimi Delta Attention (arXiv 2510.26692) forgets each channel of keys by itself: a and dt are numbers
of a channel, and a row of S is multiplied by what its own says. o is multiplied by sigmoid(z). z
and a are products of a few channels each, of `rank`, or of the hidden states. Where there is a
`floor`, a number below 0, what a row is multiplied by has a bound:

    S = exp(floor * sigmoid(exp(decay) * (a + dt))) * S
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from qoff.errors import OpError

L2_EPS = 1e-6  # under the root of a key's or query's length


@dataclass(frozen=True)
class DeltaShape:
    """Sizes of one layer. Raises OpError for what no kernel has."""

    key_heads: int
    value_heads: int
    key_dim: int  # channels of a query and of a key
    value_dim: int
    taps: int  # tokens that the convolution sees
    norm_eps: float = 1e-6
    by_channel: bool = False  # whether each channel of keys forgets by itself: KDA
    rank: int = 0  # of KDA's a and z; 0: each has a matrix of its own
    floor: float = 0.0  # of KDA: the least logarithm of what remains; 0: there is none
    learns: float = 1.0  # the most of a correction that a state makes; of Gated DeltaNet
    apart: bool = False  # b and a are products of a matrix each; of Gated DeltaNet

    def __post_init__(self) -> None:
        if min(self.key_heads, self.key_dim, self.value_dim) < 1 or self.taps < 2:
            raise OpError(f"linear attention needs heads, channels and 2 taps or more: {self}")
        if self.value_heads < 1 or self.value_heads % self.key_heads:
            raise OpError(
                f"linear attention of {self.value_heads} value heads for {self.key_heads} key "
                "heads; use a multiple"
            )
        if self.key_dim % 16 or self.value_dim % 16:
            raise OpError(
                f"linear attention with keys of {self.key_dim} channels and values of "
                f"{self.value_dim}; use multiples of 16"
            )
        if not self.floor <= 0 or math.isinf(self.floor):
            raise OpError(f"linear attention with a floor of {self.floor}; use a number up to 0")
        if (self.rank or self.floor) and not self.by_channel:
            raise OpError(f"linear attention other than KDA has no rank and no floor: {self}")
        if not 0 < self.learns <= 2:
            raise OpError(f"linear attention that learns {self.learns}; use up to 2")
        if self.by_channel and (self.learns != 1 or self.apart):
            raise OpError(f"KDA learns 1 at most, and has b beside what it forgets: {self}")

    @property
    def keys(self) -> int:
        """Channels of all keys, and of all queries."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Channels of all values, of z and of the output."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Those that are convolved: queries, keys, values."""
        return 2 * self.keys + self.values

    @property
    def decays(self) -> int:
        """What a token's a has: a number of each value head, or of each of its key's channels."""
        return self.value_heads * (self.key_dim if self.by_channel else 1)

    @property
    def projections(self) -> tuple[int, ...]:
        """See `states.StateShape`: of queries, keys, values and z; of b and a.

        Where b and a are apart, of one after the other. Where there is a rank: of queries, keys and
        values; of what a and z come of, and b; of a; of z.
        """
        if self.rank:
            return self.channels, 2 * self.rank + self.value_heads, self.decays, self.values
        if self.apart:
            return self.channels + self.values, self.value_heads, self.decays
        return self.channels + self.values, self.value_heads + self.decays

    @property
    def operands(self) -> int:
        """See `states.StateShape`."""
        return self.channels + self.values + self.value_heads + self.decays

    @property
    def panel(self) -> int:
        """Channels of values whose part of a state lies together."""
        return math.gcd(self.value_dim, 64)

    @property
    def conv_shape(self) -> tuple[int, int]:
        """Of what a sequence remembers of its newest tokens, oldest first."""
        return self.taps - 1, self.channels

    @property
    def memory_shape(self) -> tuple[int, int, int, int]:
        """Of a sequence's states: [value heads, panels, key_dim, panel]."""
        return self.value_heads, self.value_dim // self.panel, self.key_dim, self.panel

    @property
    def state_bytes(self) -> int:
        """What a sequence takes in a layer."""
        return 4 * (math.prod(self.conv_shape) + math.prod(self.memory_shape))


@dataclass(frozen=True, eq=False)
class DeltaWeights:
    """Small weights of a layer, float32."""

    conv: Tensor  # [taps * channels], tap by tap, the newest token's last
    decay: Tensor  # [value_heads], A_log
    dt_bias: Tensor  # [decays]
    norm: Tensor  # [value_dim]
