"""Experts in host memory that the CPU beside a GPU computes: its work, and what crosses links."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from qoff.memory.experts.on_cpu import AHEAD

from .mixture import Array, Mixture
from .phase import PLACED, RESOURCES, Choices
from .profile import MachineProfile

_OUT, _IN, _CPU, _GPU, _MEMORY = (
    RESOURCES.index(name) for name in ("from device", "to device", "cpu", "gpu", "memory")
)
_HOST = 1 + PLACED.index("weights on host")  # behind what is always so
_FLOAT = 4  # bytes


@dataclass(frozen=True)
class OnCpu:
    """A round of plans, where all experts are in host memory; an element of each array a plan.

    columns: numbers of all experts, of so many bits. rows: of a pass; last_rows: those that go on
    in the last layer. here: seconds that experts take on the device. Arrays that are changed are
    [plans, resources, 1 + PLACED], and what depends on the part in host memory is for all weights.
    """

    mixture: Mixture
    machine: MachineProfile
    hidden_size: int
    columns: float
    bits: int
    weight_bytes: int
    activation_bytes: int
    rows: Array
    last_rows: Array
    passes: Array
    here: Array

    def cross(self, c: Choices, bytes_: Array, asked: Array) -> None:
        """Have inputs and outputs cross the links in place of these experts."""
        inputs, outputs = self._crossing
        calls, on_cpu = sum(self.mixture.experts.layers) * self.passes, c.cpu_experts
        share = self.mixture.share
        bytes_[:, _IN, _HOST] = np.where(on_cpu, outputs / share, bytes_[:, _IN, _HOST])
        asked[:, _IN, _HOST] = np.where(on_cpu, calls / share, asked[:, _IN, _HOST])
        bytes_[:, _OUT, 0] += np.where(on_cpu, inputs, 0.0)
        asked[:, _OUT, 0] += np.where(on_cpu, calls, 0.0)

    def compute(self, c: Choices, busy: Array) -> None:
        """Have the CPU compute them, and the device so much less.

        It reads them for the first pass of a round, and for what waits then, and waits itself for
        what comes before the experts of a layer, and for inputs and outputs: in the block schedule,
        of one pass.
        """
        machine, mixture = self.machine, self.mixture
        times = np.where(c.block, np.minimum(self.passes, 1.0 + AHEAD), self.passes)
        rows = self.rows * self.passes, self.last_rows * self.passes
        there = mixture.seconds(machine.host, self.columns, self.bits, rows, times)
        alone = np.where(c.block, self.passes, 1.0)  # passes that others go on beside
        inputs, outputs = self._crossing
        before = busy[:, _GPU, 0] - self.here + inputs / machine.from_device.bytes_per_s
        there = there + outputs / machine.to_device.bytes_per_s / alone
        read = times * mixture.wanted(rows[0] / times) * self.weight_bytes
        on_cpu = c.cpu_experts
        busy[:, _GPU, _HOST] -= np.where(on_cpu, self.here / mixture.share, 0.0)
        busy[:, _CPU, _HOST] += np.where(on_cpu, there / mixture.share, 0.0)
        busy[:, _CPU, 0] += np.where(on_cpu, before / alone, 0.0)
        busy[:, _MEMORY, _HOST] += np.where(on_cpu, read, 0.0)

    @property
    def _crossing(self) -> tuple[Array, Array]:
        """Bytes of inputs of all tokens, and of outputs of all pairs; in the last layer, too."""
        numbers = sum(self.mixture.experts.layers) * self.rows * self.passes * self.hidden_size
        return numbers * self.activation_bytes, numbers * self.mixture.experts.top_k * _FLOAT
