"""What recurrent layers remember of a sequence: states of a fixed size.

Every one has a causal convolution of each channel, and remembers its newest inputs. Gated DeltaNet
and KDA (`layout.delta`) and Mamba 2 (`layout.mamba`) have a memory beside, short convolutions
(`layout.short_conv`) have none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from .device_cache import PassTables

SPAN_FIELDS = ("first row", "rows", "slot")


@runtime_checkable
class StateShape(Protocol):
    """Sizes of one recurrent layer."""

    @property
    def projections(self) -> tuple[int, ...]:
        """Outputs of each matrix that comes before its op."""

    @property
    def operands(self) -> int:
        """Numbers of a token that its op is given."""

    @property
    def values(self) -> int:
        """Numbers of a token that its op returns."""

    @property
    def conv_shape(self) -> tuple[int, int]:
        """Of what a sequence remembers of its newest tokens, oldest first: [taps - 1, channels]."""

    @property
    def memory_shape(self) -> tuple[int, ...]:
        """Of what else a sequence remembers; (0,): nothing."""

    @property
    def state_bytes(self) -> int:
        """What a sequence takes in a layer."""


@dataclass(frozen=True, eq=False)
class LayerStates:
    """What a layer remembers of the sequences in slots, float32, and those that a pass reads.

    Those of a sequence's first pass hold anything.
    """

    conv: Tensor  # [slots, *conv_shape]
    memory: Tensor  # [slots, *memory_shape]
    spans: Tensor  # int64 [sequences, SPAN_FIELDS]


@dataclass(frozen=True, eq=False)
class DeviceLayerStates:
    """The same on a GPU, of all S slots of a cache; a slot without new tokens is left as it is."""

    conv: Tensor  # [S, *conv_shape]
    memory: Tensor  # [S, *memory_shape]
    step: PassTables


def state_bytes(shapes: Sequence[StateShape]) -> int:
    """What a sequence takes in all layers."""
    return sum(shape.state_bytes for shape in shapes)
