"""What watches a run, and what stands in for parts of it in tests."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch

from qoff.kernels.ops import Ops, ops_for, with_activation_bits

from .io.link import Links
from .io.timeline import Timeline


@dataclass(frozen=True)
class Instrumentation:
    """Made once, and handed to all that hold or move bytes.

    timeline: notes every move and computation. poison: memory that holds nothing is filled with
    0xFF, NaN in floats. links: slower ones than there are. ops: others than the device's.
    """

    timeline: Timeline | None = None
    poison: bool = False
    links: Links = field(default_factory=Links)
    ops: Ops | None = None

    def ops_for(self, device: torch.device, activation_bits: int = 16) -> Ops:
        """The ops to compute with.

        Raises OpError where a device has none, ArgumentError for activation bits that it cannot
        round to.
        """
        return with_activation_bits(self.ops or ops_for(device), activation_bits)

    def span(self, lane: str, name: str) -> AbstractContextManager[None]:
        """Note how long a `with` block takes, if there is a timeline."""
        return nullcontext() if self.timeline is None else self.timeline.span(lane, name)


PLAIN = Instrumentation()
