"""What a spec says of layers with states in place of attention, or beside it: kind and sizes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from qoff.errors import OpError, UnsupportedModelError
from qoff.kernels.layout.delta import DeltaShape
from qoff.kernels.layout.mamba import MambaShape
from qoff.kernels.layout.short_conv import ShortConvShape
from qoff.kernels.layout.states import StateShape

from .spec_parts import unsupported


class RecurrentSpec(ABC):
    """Some layers have this in place of attention.

    KIND: what configs call such a layer. beside: they attend, too, and both are given the same.
    scale: of what it adds. Raises UnsupportedModelError for sizes without a kernel, and where no
    layer attends.
    """

    KIND: ClassVar[str] = "linear_attention"
    layers: tuple[bool, ...]  # per layer: whether it is one
    beside: bool = False
    scale: float = 1.0

    def __post_init__(self) -> None:
        if all(self.layers) and not self.beside:
            raise unsupported("layer_types", f"{self.KIND} alone", "a full_attention layer")
        try:
            self.shape(0.0)
        except OpError as error:
            raise UnsupportedModelError(f"config.json: {error}") from error

    @abstractmethod
    def shape(self, norm_eps: float) -> StateShape:
        """The same of one layer. norm_eps: of the norm of what it gives, if there is one."""


@dataclass(frozen=True)
class LinearSpec(RecurrentSpec):
    """Gated DeltaNet, or KDA: `layout.delta.DeltaShape`."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    layers: tuple[bool, ...]
    by_channel: bool = False  # KDA
    rank: int = 0
    floor: float = 0.0
    learns: float = 1.0
    apart: bool = False
    own_eps: float | None = None  # of the norm of what it gives; None: that of the model's norms

    def shape(self, norm_eps: float) -> DeltaShape:
        sizes = self.key_heads, self.value_heads, self.key_dim, self.value_dim, self.taps
        eps = norm_eps if self.own_eps is None else self.own_eps
        kda = self.by_channel, self.rank, self.floor
        return DeltaShape(*sizes, eps, *kda, self.learns, self.apart)


@dataclass(frozen=True)
class ShortConvSpec(RecurrentSpec):
    """A gated short convolution: `layout.short_conv`."""

    KIND: ClassVar[str] = "conv"
    channels: int
    taps: int
    layers: tuple[bool, ...]

    def shape(self, norm_eps: float) -> ShortConvShape:
        return ShortConvShape(self.channels, self.taps)


@dataclass(frozen=True)
class MambaSpec(RecurrentSpec):
    """Mamba 2: `layout.mamba.MambaShape`. conv_bias: of the convolution.

    normed: there is a norm at its end. factors: what z, x, B, C and dt are multiplied by.
    """

    heads: int
    head_dim: int
    groups: int
    state: int
    taps: int
    conv_bias: bool
    layers: tuple[bool, ...]
    normed: bool = True
    factors: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)
    scale: float = 1.0
    beside: bool = False

    def shape(self, norm_eps: float) -> MambaShape:
        sizes = self.heads, self.head_dim, self.groups, self.state, self.taps
        return MambaShape(*sizes, norm_eps, self.factors)
