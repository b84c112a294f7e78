"""Residency: which weights stay on the device, which stream through its slots, and from where.

The device holds the resident weights, S slots that each take what the largest unit streams, staging
memory where weights are repacked on the way, and working space. Placement is by the tensor. A unit
that streams more than a slot shall take is tiled: its vectors stay, its matrices stream in tiles.
What streams has its source on disk, or unit by unit in host memory. The experts of a mixture may
come one by one instead, as tokens choose them, through the slots of a cache of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from qoff.checkpoint import Checkpoint
from qoff.errors import ArgumentError
from qoff.memory.arena import PAGE, round_up

from .experts import LayerExperts, expert_units, layer_experts
from .image import Image, make_image
from .parts import Total, kept_images, plan_unit, streamed_bytes, streamed_image
from .tiles import tile_image
from .units import (
    HEAD,
    Expert,
    Tile,
    TiledMatrix,
    Unit,
    WholeUnit,
    row_tables,
    stored_matrix,
    unit_files,
)


@dataclass(frozen=True)
class Residency:
    """A plan for the weights: names of those that stay, and bytes by purpose."""

    resident: frozenset[str]
    slots: int  # 0 when nothing comes through them
    slot_bytes: int
    resident_bytes: int
    staging_bytes: int
    workspace: int
    packing: str  # of quantized weights on the device
    # bytes in a slot of all that streams but experts one by one, in the order of computation
    streamed: Mapping[Unit, int] = field(default_factory=dict, hash=False)
    host: frozenset[Unit] = frozenset()  # streamed from host memory; `row_tables`: their rows
    host_weight_bytes: int = 0
    host_staging: int = 0  # buffers in host memory for what goes from disk to the device
    host_staging_bytes: int = 0  # of all of them
    expert_slots: int = 0  # of the cache that experts come to one by one; 0: they do not
    expert_bytes: int = 0  # of one of them
    host_expert_slots: int = 0  # in host memory, for experts that left the others
    expert_bias_bytes: int = 0  # of the biases of the expert in a slot, which lie together
    cpu_experts: frozenset[Expert] = frozenset()  # that the CPU computes where they stay, the host
    cpu_expert_bytes: int = 0  # of all of them
    cpu_bias_bytes: int = 0  # of their biases
    cpu_staging_bytes: int = 0  # for repacking them while they are loaded
    passing_from: int | None = None  # tokens of a pass from which they pass through the device
    passing: int = 0  # experts that are computed together then
    passing_bytes: int = 0  # of the device that this takes: see `passing_bytes_of`

    @property
    def device_bytes(self) -> int:
        """Bytes of the device arena, all purposes together."""
        slots = self.slots * self.slot_bytes + self.cache_bytes + self.passing_bytes
        return self.resident_bytes + slots + self.staging_bytes + self.workspace

    @property
    def cache_bytes(self) -> int:
        """Bytes of the slots for experts, with their biases."""
        biases = round_up(self.expert_slots * self.expert_bias_bytes, PAGE)
        return self.expert_slots * self.expert_bytes + biases

    @property
    def host_bytes(self) -> int:
        """Bytes of the host arena."""
        kept = self.host_expert_slots * self.expert_bytes
        return self.host_weight_bytes + self.host_staging_bytes + kept + self.on_cpu_bytes

    @property
    def on_cpu_bytes(self) -> int:
        """Bytes of the host arena for experts that the CPU computes."""
        beside = round_up(self.cpu_bias_bytes, PAGE) + round_up(self.cpu_staging_bytes, PAGE)
        return self.cpu_expert_bytes + beside

    @property
    def device_weight_bytes(self) -> int:
        """Bytes of the device arena for weights: that stay, and that the others come through."""
        return self.device_bytes - self.workspace

    @property
    def weight_bytes(self) -> int:
        """The same of both arenas."""
        return self.device_weight_bytes + self.host_bytes

    @cached_property
    def tiles(self) -> tuple[Tile, ...]:
        """Those of all tiled units, in the order of computation."""
        return tuple(unit for unit in self.streamed if isinstance(unit, Tile))

    @property
    def tiled(self) -> frozenset[WholeUnit]:
        """The units whose matrices stream in tiles."""
        return frozenset(tile.unit for tile in self.tiles)

    @property
    def tiled_layers(self) -> frozenset[WholeUnit]:
        """Those of them that are layers: each pass keeps values of its own from tile to tile."""
        return self.tiled - {HEAD}

    @property
    def in_parts(self) -> bool:
        """Whether layers come in parts, between which each pass keeps values of its own."""
        return bool(self.tiled_layers) or self.expert_slots > 0


def residency_of(
    checkpoint: Checkpoint,
    resident: Iterable[str],
    slots: int = 2,
    workspace: int = 0,
    packing: str = "rows16",
    tile_bytes: int | None = None,
    expert_slots: int = 0,
) -> Residency:
    """The residency that keeps the named weights, and what it takes in bytes.

    A unit that would stream more than `tile_bytes` streams in tiles of at most that, or of 32 rows,
    and its vectors stay too; but not one with experts. With `expert_slots` experts come one by one
    through as many slots, and none is resident. Raises ArgumentError for fewer than two slots or a
    name the checkpoint does not have.
    """
    check_slots(slots)
    one_by_one = expert_slots > 0
    experts = [e for e in layer_experts(checkpoint, packing) if e.count] if one_by_one else []
    files = unit_files(checkpoint)
    wanted = set(resident)
    unknown = wanted.difference(*(file.weights for file in files.values()))
    if unknown:
        raise ArgumentError(f"{checkpoint.path} has no weights {', '.join(sorted(unknown))}")
    units = {
        unit: plan_unit(unit, file, wanted, packing, tile_bytes, one_by_one)
        for unit, file in files.items()
    }
    kept = frozenset[str]().union(*(unit.kept for unit in units.values()))
    streamed = dict[Unit, int]()
    for unit, plan in units.items():
        streamed |= streamed_bytes(unit, files[unit], plan, packing)
    total = Total.of(list(units.values()))
    return joined(total, kept, streamed, slots, workspace, packing, experts, expert_slots)


def joined(
    total: Total,
    kept: frozenset[str],
    streamed: Mapping[Unit, int],
    slots: int,
    workspace: int,
    packing: str,
    experts: Sequence[LayerExperts],
    expert_slots: int,
) -> Residency:
    """The residency of planned units. experts: of the layers that have any, where they come one by
    one through `expert_slots`."""
    return Residency(
        kept,
        slots if total.slot else 0,
        total.slot,
        total.resident,
        max([total.staging, *(e.staging_bytes for e in experts)]),
        workspace,
        packing,
        streamed,
        expert_slots=expert_slots if experts else 0,
        expert_bytes=max((e.nbytes for e in experts), default=0),
        expert_bias_bytes=max((e.bias_bytes for e in experts), default=0),
    )


def check_slots(slots: int) -> None:
    """Raise ArgumentError for fewer slots than streaming takes."""
    if slots < 2:
        raise ArgumentError(
            f"{slots} slots are too few: use 2 or more, one is read into while another is in use"
        )


def resident_images(checkpoint: Checkpoint, plan: Residency) -> dict[WholeUnit, list[Image]]:
    """How the weights of each unit's file that stay on the device lie there."""
    return {
        unit: kept_images(file, file.weights.keys() & plan.resident, plan.packing)
        for unit, file in unit_files(checkpoint).items()
    }


def streamed_images(checkpoint: Checkpoint, plan: Residency) -> dict[Unit, Image]:
    """All that streams, in the order of computation, and how it lies in a slot."""
    images: dict[Unit, Image] = {}
    tiled = tiled_matrices(checkpoint, plan)
    for unit, file in unit_files(checkpoint).items():
        if unit in tiled:
            for name, matrix in tiled[unit].items():
                entry = stored_matrix(unit, file, name)
                images |= {t: tile_image(file, entry, t, plan.packing) for t in matrix.tiles}
        else:
            image = streamed_image(unit, file, plan.resident, plan.packing, plan.expert_slots > 0)
            if image is not None:
                images[unit] = image
    return images


def tiled_matrices(
    checkpoint: Checkpoint, plan: Residency
) -> dict[WholeUnit, dict[str, TiledMatrix]]:
    """The matrices of each tiled unit that come in tiles, by the names that computations use."""
    files = unit_files(checkpoint)
    parts: dict[tuple[WholeUnit, str], list[Tile]] = {}
    for tile in plan.tiles:
        parts.setdefault((tile.unit, tile.name), []).append(tile)
    tiled: dict[WholeUnit, dict[str, TiledMatrix]] = {}
    for (unit, name), tiles in parts.items():
        shape = stored_matrix(unit, files[unit], name).shape
        tiled.setdefault(unit, {})[name] = TiledMatrix(shape, tuple(tiles))
    return tiled


def host_images(
    checkpoint: Checkpoint, plan: Residency, streamed: Mapping[Unit, Image]
) -> dict[Unit, Image]:
    """All that host memory holds and how it lies there: in the order of computation, then rows."""
    images = {unit: image for unit, image in streamed.items() if unit in plan.host}
    experts = layer_experts(checkpoint, plan.packing) if plan.expert_slots else []
    for unit in expert_units(experts):
        if unit in plan.host:
            images[unit] = experts[unit.layer].image(unit.number)
    for table in row_tables(checkpoint.outer):
        if table in plan.host:
            images[table] = rows_image(checkpoint, table)
    return images


def rows_image(checkpoint: Checkpoint, table: str) -> Image:
    """How a table lies whose rows are gathered: as in its file."""
    return make_image(checkpoint.outer, [table], None)
