"""Operands of the ops of models whose hidden states are several streams (`reference.streams`)."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class StreamRouter(NamedTuple):
    """What says how streams mix: tanh(weight @ norm(x) / H), a number for each of S streams."""

    norm: Tensor  # [H], of an RMSNorm
    eps: float
    weight: Tensor  # [S * H], S rows one after the other

    @property
    def streams(self) -> int:
        """How many there are."""
        return len(self.weight) // len(self.norm)
