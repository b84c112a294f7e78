"""Experts in host memory that the CPU beside a GPU computes: its work, and what crosses links.

For passes of many tokens they pass through the GPU instead, which computes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

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
_TOKENS = 1 << 14  # of a pass, at most


@dataclass(frozen=True)
class HostExperts:
    """All experts of a mixture, as if they were in host memory beside a GPU.

    width: numbers of a token that an expert is given. columns: numbers of all experts, of so many
    bits, nbytes together. repacked_bytes: that are read and written where all of them are repacked.
    group_bytes: of those that one copy brings. activation_bytes: of a number of the inputs.
    """

    mixture: Mixture
    machine: MachineProfile
    width: int
    columns: float
    bits: int
    nbytes: float
    repacked_bytes: int
    group_bytes: int
    activation_bytes: int

    def faster_on_cpu(self, passes: int) -> int:
        """The most tokens of a pass whose experts the CPU computes before a link has brought them.

        passes: that go through a layer one after another, for all of which experts come once, while
        the CPU computes for a few of them at a time. In all layers: the CPU with its inputs and
        outputs, against the link or the GPU that repacks and computes meanwhile, whichever takes
        longer. Up to 16,384.
        """
        tokens = np.arange(1, _TOKENS + 1, dtype=float)
        all_rows, once, machine = passes * tokens, np.ones_like(tokens), self.machine
        rows = all_rows, all_rows
        inputs, outputs = self.crossing(all_rows)
        times = min(passes, 1 + AHEAD) * once
        there = self.mixture.seconds(machine.host, self.columns, self.bits, rows, times)
        there += inputs / machine.from_device.bytes_per_s + outputs / machine.to_device.bytes_per_s
        nbytes = self.nbytes * self.mixture.wanted(all_rows)
        here = self.mixture.seconds(machine.device, self.columns, self.bits, rows, once)
        link = machine.to_device
        brought = nbytes / link.bytes_per_s + nbytes / self.group_bytes * link.request_s
        slower = there > np.maximum(brought, here + self.repack_s(nbytes))
        return int(np.argmax(slower)) if slower.any() else _TOKENS

    def crossing(self, rows: Array) -> tuple[Array, Array]:
        """Bytes of inputs, and of outputs of all pairs, of so many rows of each layer."""
        numbers = sum(self.mixture.experts.layers) * rows * self.width
        return numbers * self.activation_bytes, numbers * self.mixture.experts.top_k * _FLOAT

    def repack_s(self, nbytes: Array) -> Array:
        """Seconds in which a GPU repacks so many bytes: it reads them, and writes what it reads."""
        moved = nbytes * (self.repacked_bytes / self.nbytes)
        found: Array = moved / self.machine.device.bytes_per_s
        return found


@dataclass(frozen=True)
class OnCpu:
    """A round of plans, where all experts are in host memory; an element of each array a plan.

    tokens: of a pass whose experts the CPU computes, at most. rows: of a pass; last_rows: those
    that go on in the last layer. here: seconds that experts take on the device. Arrays that are
    changed are [plans, resources, 1 + PLACED], and what depends on the part in host memory is for
    all weights.
    """

    experts: HostExperts
    tokens: Array
    rows: Array
    last_rows: Array
    passes: Array
    here: Array

    def cross(self, c: Choices, bytes_: Array, asked: Array) -> None:
        """Have inputs and outputs cross the links, or experts that pass through the device."""
        inputs, outputs = self._crossing
        layers, share = sum(self._mixture.experts.layers), self._mixture.share
        calls, on_cpu = layers * self._on_cpu * self.passes, c.cpu_experts
        passing = self._passing_bytes(c)
        requests = passing / self.experts.group_bytes
        bytes_[:, _IN, _HOST] = np.where(on_cpu, (outputs + passing) / share, bytes_[:, _IN, _HOST])
        asked[:, _IN, _HOST] = np.where(on_cpu, (calls + requests) / share, asked[:, _IN, _HOST])
        bytes_[:, _OUT, 0] += np.where(on_cpu, inputs, 0.0)
        asked[:, _OUT, 0] += np.where(on_cpu, calls, 0.0)

    def compute(self, c: Choices, busy: Array) -> None:
        """Have the CPU compute them, and the device so much less.

        It reads them for the first pass of a round, and for what waits then, and waits itself for
        what comes before the experts of a layer, and for inputs and outputs: in the block schedule,
        of one pass. What passes through the device is repacked there.
        """
        experts, mixture, machine = self.experts, self._mixture, self.experts.machine
        times = np.where(c.block, np.minimum(self.passes, 1.0 + AHEAD), self.passes)
        rows = self.rows * self.passes, self.last_rows * self.passes
        how = experts.columns, experts.bits, rows
        there = mixture.seconds(machine.host, *how, times, of=self._left)
        together = np.where(c.block, 1.0, self.passes)
        spared, every = (
            mixture.seconds(machine.device, *how, together, of=of)
            for of in (self._left, (1.0, 1.0))
        )
        spared = self.here * spared / np.maximum(every, 1e-30)
        alone = np.where(c.block, self.passes, 1.0)  # passes that others go on beside
        inputs, outputs = self._crossing
        before = self._on_cpu * (busy[:, _GPU, 0] - self.here)
        before = before + inputs / machine.from_device.bytes_per_s
        there = there + outputs / machine.to_device.bytes_per_s / alone
        read = times * self._wanted(self._left, times) * experts.nbytes
        repacked = experts.repack_s(self._passing_bytes(c))
        on_cpu, share = c.cpu_experts, mixture.share
        busy[:, _GPU, _HOST] += np.where(on_cpu, (repacked - spared) / share, 0.0)
        busy[:, _CPU, _HOST] += np.where(on_cpu, there / share, 0.0)
        busy[:, _CPU, 0] += np.where(on_cpu, before / alone, 0.0)
        busy[:, _MEMORY, _HOST] += np.where(on_cpu, read / share, 0.0)

    @property
    def _mixture(self) -> Mixture:
        return self.experts.mixture

    @cached_property
    def _left(self) -> tuple[Array, Array]:
        """1 where the CPU computes: in the layers but the last, and in that."""
        return (
            (self.rows <= self.tokens).astype(float),
            (self.last_rows <= self.tokens).astype(float),
        )

    @property
    def _on_cpu(self) -> Array:
        """The part of the layers with experts that the CPU computes for."""
        most, last = self._mixture.of_layers
        return most * self._left[0] + last * self._left[1]

    def _wanted(self, of: tuple[Array, Array], times: Array) -> Array:
        """The part of all experts that rows want, of layers `of`, in so many times."""
        found = np.zeros_like(times)
        for part, layers, rows in zip(
            of, self._mixture.of_layers, (self.rows, self.last_rows), strict=True
        ):
            found += part * layers * self._mixture.wanted(rows * self.passes / times)
        return found

    def _passing_bytes(self, c: Choices) -> Array:
        """Bytes of experts that pass through the device in a round, if none is there."""
        times = np.where(c.block, 1.0, self.passes)
        here = 1 - self._left[0], 1 - self._left[1]
        found: Array = times * self._wanted(here, times) * self.experts.nbytes
        return found

    @property
    def _crossing(self) -> tuple[Array, Array]:
        """Bytes of inputs and of outputs that the CPU has of a round."""
        both = zip(self._left, self._mixture.of_layers, (self.rows, self.last_rows), strict=True)
        rows = sum(part * layers * m for part, layers, m in both) * self.passes
        return self.experts.crossing(rows)
