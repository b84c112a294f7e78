"""What watches a run, and what stands in for parts of it in tests."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from qoff.kernels.layout.qexperts import QExperts
from qoff.kernels.ops import Ops, ops_for, with_activation_bits
from qoff.kernels.repack import repack_experts
from qoff.settings import cuda_graphs
from qoff.system_memory import check_free

from .arena import map_pages
from .io.clock import SYSTEM, Clock
from .io.direct import Preadv
from .io.timeline import Timeline


@dataclass(frozen=True)
class Instrumentation:
    """Made once, and handed to all that hold or move bytes.

    timeline: notes every move and computation. poison: memory that holds nothing is filled with
    0xFF, NaN in floats. ops: others than the device's. preadv: reads in place of `os.preadv`.
    on_copy: called with the bytes of each copy between host and device, before it is made. record:
    makes replays of decode steps in place of CUDA graphs, on a CPU too; see `graphs.Replays`.
    clock: what time it is, and who waits. pages: main memory. check_memory: raises where the
    machine has less, as `check_free`. expert_moves: in place of `experts.ExpertMoves`. repack:
    experts that pass through the device.
    """

    timeline: Timeline | None = None
    poison: bool = False
    ops: Ops | None = None
    preadv: Preadv = os.preadv
    on_copy: Callable[[int], object] = lambda _: None
    record: Callable[[Callable[[], None]], Callable[[], object]] | None = None
    clock: Clock = SYSTEM
    pages: Callable[[int], torch.Tensor] = map_pages
    check_memory: Callable[..., object] = check_free
    expert_moves: Callable[..., Any] | None = None
    repack: Callable[[QExperts, QExperts], None] = repack_experts

    def ops_for(self, device: torch.device, activation_bits: int = 16) -> Ops:
        """The ops to compute with.

        Raises OpError where a device has none, ArgumentError for activation bits that it cannot
        round to.
        """
        return with_activation_bits(self.ops or ops_for(device), activation_bits)

    def records(self, device: torch.device) -> bool:
        """Whether steps of decoding are recorded on a device, and replayed."""
        return self.record is not None or (device.type == "cuda" and cuda_graphs())

    @property
    def watches_copies(self) -> bool:
        """Whether somebody sees each copy, or waits for it by a clock of their own."""
        watched = self.timeline is not None or self.on_copy is not PLAIN.on_copy
        return watched or self.clock is not SYSTEM

    def span(self, lane: str, name: str, nbytes: int = 0) -> AbstractContextManager[None]:
        """Note how long a `with` block takes, if there is a timeline."""
        return nullcontext() if self.timeline is None else self.timeline.span(lane, name, nbytes)


PLAIN = Instrumentation()
