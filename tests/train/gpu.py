"""Training on a GPU without one: copies are made by threads that take their time.

Memory of the GPU is memory of the host, and NaN from the time that something is copied to it until
that has come: so what is computed too early is NaN, and so is the loss.
"""

from __future__ import annotations

import sys
from functools import partial

import pytest
import torch

from qoff.train import building
from qoff.train.gpu_link import GpuLink
from tests.memory.kinds import SimulatedStream

STAGING = 8192  # bytes: so that units go in pieces


def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `offload` take the CPU for a GPU."""

    def streams(device: torch.device) -> tuple[SimulatedStream, SimulatedStream]:
        return SimulatedStream(device), SimulatedStream(device)

    monkeypatch.setattr(sys.modules["qoff.train.offload"], "streams_of", streams)
    monkeypatch.setattr(building, "GpuLink", partial(GpuLink, poison=True))
    monkeypatch.setattr("qoff.train.gpu_link.STAGING", STAGING)
