"""Residency: which weights stay on the device, which stream through its slots; planned by hand.

The device holds the resident weights, S slots that each take what the largest unit streams, staging
memory where weights are repacked on the way, and working space. Placement is by the tensor. What
streams of a layer is the beginning of its file, which is one read; every layer streams about as
much, because then every slot is small and the disk never waits for a run of resident layers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from qoff.checkpoint import Checkpoint, WeightFile
from qoff.errors import ArgumentError, BudgetError

from .image import Image, make_image
from .units import HEAD, Unit, unit_files, unit_weights


@dataclass(frozen=True)
class Residency:
    """A plan for the weights: names of those that stay, and bytes by purpose."""

    resident: frozenset[str]
    slots: int  # 0 when nothing streams
    slot_bytes: int
    resident_bytes: int
    staging_bytes: int
    workspace: int
    packing: str  # of quantized weights on the device

    @property
    def device_bytes(self) -> int:
        """Bytes of the device arena, all purposes together."""
        slots = self.slots * self.slot_bytes
        return self.resident_bytes + slots + self.staging_bytes + self.workspace


def residency_of(
    checkpoint: Checkpoint,
    resident: Iterable[str],
    slots: int = 2,
    workspace: int = 0,
    packing: str = "cpu16",
) -> Residency:
    """The residency that keeps exactly the named weights, and what it takes in bytes.

    Raises ArgumentError for fewer than two slots or a name the checkpoint does not have.
    """
    if slots < 2:
        raise ArgumentError(f"{slots} slots are too few: one is read while another is in use")
    kept = frozenset(resident)
    resident_bytes = slot_bytes = staging = 0
    known: set[str] = set()
    for unit, file in unit_files(checkpoint).items():
        known.update(file.weights)
        for image in resident_images(file, kept & set(file.weights), packing):
            resident_bytes += image.nbytes
            staging = max(staging, image.raw_bytes * image.repacked)
        streamed = streamed_image(checkpoint, unit, kept, packing)
        if streamed is not None:
            slot_bytes = max(slot_bytes, streamed.nbytes)
            staging = max(staging, streamed.raw_bytes * streamed.repacked)
    if not kept <= known:
        raise ArgumentError(f"not in {checkpoint.path}: {', '.join(sorted(kept - known))}")
    count = slots if slot_bytes else 0
    return Residency(kept, count, slot_bytes, resident_bytes, staging, workspace, packing)


def resident_images(file: WeightFile, names: Iterable[str], packing: str) -> list[Image]:
    """How resident weights of one file lie: together as read, or each alone when repacked."""
    wanted = set(names)
    if not wanted:
        return []
    together = make_image(file, wanted, packing)
    if not together.repacked:
        return [together]
    return [make_image(file, [name], packing) for name in file.weights if name in wanted]


def streamed_image(
    checkpoint: Checkpoint, unit: Unit, resident: frozenset[str], packing: str
) -> Image | None:
    """How the weights that a unit streams lie in a slot; None if all of them are resident."""
    names = [name for name in unit_weights(checkpoint, unit) if name not in resident]
    return make_image(unit_files(checkpoint)[unit], names, packing) if names else None


def plan_residency(
    checkpoint: Checkpoint,
    device_memory: int | None,
    slots: int = 2,
    workspace: int = 0,
    packing: str = "cpu16",
) -> Residency:
    """Keep as much as fits into `device_memory` bytes (None: everything), stream the rest.

    First the head, whose slot would be the largest; then the ends of all layers alike, a tensor at
    a time; then one tensor more of as many layers as possible. An untied embedding stays only when
    everything does. `workspace` bytes are left free for computations. Raises BudgetError with the
    bytes there and the least bytes any plan takes.
    """
    planner = _Planner(checkpoint, slots, workspace, packing)
    everything = planner.keep(f for file in unit_files(checkpoint).values() for f in file.weights)
    if device_memory is None or everything.device_bytes <= device_memory:
        return everything
    least = everything.device_bytes
    for head in (True, False):
        for level in range(planner.levels, -1, -1):
            plan = planner.even(head, level, 0)
            least = min(least, plan.device_bytes)
            if plan.device_bytes <= device_memory:
                return planner.fill_up(plan, head, level, device_memory)
    raise BudgetError(
        f"device memory: the weights of {checkpoint.path} want {everything.device_bytes:,} bytes, "
        f"{device_memory:,} are there, and streaming takes at least {least:,} "
        f"({slots} slots, {workspace:,} bytes of working space); raise the budget to that"
    )


class _Planner:
    """Candidates of `plan_residency`."""

    def __init__(self, checkpoint: Checkpoint, slots: int, workspace: int, packing: str) -> None:
        self._checkpoint = checkpoint
        self._options = (slots, workspace, packing)
        self._layers = [tuple(file.weights) for file in checkpoint.layers]
        self._head = unit_weights(checkpoint, HEAD)
        self.levels = max(map(len, self._layers), default=0)

    def keep(self, names: Iterable[str]) -> Residency:
        return residency_of(self._checkpoint, names, *self._options)

    def even(self, head: bool, level: int, extra: int) -> Residency:
        """The last `level` weights of every layer stay, and one more of `extra` layers."""
        count = len(self._layers)
        more = {i * count // extra for i in range(extra)}
        names = list(self._head) if head else []
        for i, weights in enumerate(self._layers):
            kept = min(level + (i in more), len(weights))
            names += weights[len(weights) - kept :]
        return self.keep(names)

    def fill_up(self, plan: Residency, head: bool, level: int, device_memory: int) -> Residency:
        """The most layers with one more weight that fit, by bisection."""
        fits, too_many = 0, len(self._layers)
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            candidate = self.even(head, level, middle)
            if candidate.device_bytes <= device_memory:
                fits, plan = middle, candidate
            else:
                too_many = middle
        return plan
