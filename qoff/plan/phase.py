"""Rounds of a plan: its discrete choices, what each resource does in a round, and how long it is.

A round takes as long as its busiest resource, and what the others do for one unit besides, because
the first unit has to come before it is computed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .mixture import Array, Moves
from .oldest import Oldest

RESOURCES = (
    "disk read",
    "disk write",
    "to device",
    "from device",
    "cpu",
    "gpu",
    "memory",
    "hidden states",  # their moves, one after another
)
PLACED = ("weights on host", "weights on disk", "KV on host", "KV on disk")
_NEAR, _FAR, _KV_NEAR, _KV_FAR = range(len(PLACED))


@dataclass(frozen=True)
class Choices:
    """The discrete parts of many plans, an element of each array a plan."""

    batch_size: Array
    batches: Array
    prefill_tokens: Array
    block: npt.NDArray[np.bool_]  # schedule: block, else sequential
    attends_on_cpu: npt.NDArray[np.bool_]
    activations: npt.NDArray[np.int64]  # 0: device, 1: host, 2: disk
    cpu_experts: npt.NDArray[np.bool_]  # the CPU beside a GPU computes those in host memory

    def __len__(self) -> int:
        return len(self.batch_size)

    @property
    def sequences(self) -> Array:
        """Of a plan at once."""
        return self.batch_size * self.batches

    def one(self, index: int) -> Choices:
        """A plan alone."""
        return Choices(*(x[index : index + 1] for x in vars(self).values()))


@dataclass(frozen=True)
class Phase:
    """Rounds of prompts, or of decoding.

    rounds: how many the workload has. base: seconds that each resource is busy in a round where
    nothing is offloaded, [plans, RESOURCES]. each: seconds more where all of the weights, or all of
    the KV cache, come from a tier, [plans, RESOURCES, PLACED]. passes: of a round. moves: what of
    the weights that are away comes. cpu_experts: whether those on the host stay there, because the
    CPU computes with them, [plans]. oldest: blocks of a sequence, of which the first are far; None:
    of all that is attended to as large a part as of all. between: seconds more where the whole KV
    cache is on disk, of what is read in the places of blocks to come, [plans, RESOURCES].
    """

    rounds: Array
    base: Array
    each: Array
    units: int
    passes: Array
    moves: Moves
    starts: Array
    head: Array
    cpu_experts: npt.NDArray[np.bool_]
    oldest: Oldest | None = None
    between: Array | None = None

    def busy(self, placed: Array) -> Array:
        """Seconds that each resource is busy; placed: parts, [plans, PLACED]."""
        found: Array = self.base + np.einsum("prq,pq->pr", self.each, self.moved(placed))
        if self.between is not None and self.oldest is not None:
            found += self.between * self.oldest.beyond(placed[:, _KV_FAR])[:, None]
        return found

    def least_moved(self, part: Array) -> Array:
        """No more than a round moves, or the CPU computes, of weights of which a part is away.

        With experts on the CPU: of a part near and a part far, near + slope * far + offset at
        least, for each line of `Moves`, as their offsets are below 0.
        """
        lines = np.minimum(1.0, self.moves.slopes) * part[:, None] + self.moves.offsets
        found: Array = np.where(self.cpu_experts, lines.max(-1), self.moves.of(part))
        return found

    def moved(self, placed: Array) -> Array:
        """The parts that a round moves of what is placed, and attends to there.

        Of experts those that are not near, or where the CPU computes them all of its own; of the KV
        cache those blocks that there are already.
        """
        found = placed.copy()
        near, far = placed[:, _NEAR], placed[:, _FAR]
        read, on_cpu = self.moves.of(far), self.cpu_experts
        found[:, _FAR] = np.where(on_cpu, self.moves.beside(far, near), read)
        found[:, _NEAR] = np.where(on_cpu, near, self.moves.of(near + far) - read)
        if self.oldest is not None:
            found[:, _KV_FAR] = self.oldest.of(placed[:, _KV_FAR])
            away = self.oldest.of(placed[:, _KV_NEAR] + placed[:, _KV_FAR])
            found[:, _KV_NEAR] = away - found[:, _KV_FAR]
        return found


def round_seconds(busy: Array, units: int) -> Array:
    """From what each resource is busy, [..., RESOURCES], to seconds of a round of so many units."""
    longest = busy.max(-1)
    rest: Array = longest + (busy.sum(-1) - longest) / units
    return rest
