"""Residency: which weights stay on the device, which stream through its slots, and from where.

The device holds the resident weights, S slots that each take what the largest unit streams, staging
memory where weights are repacked on the way, and working space. Placement is by the tensor. A unit
that streams more than a slot shall take is tiled: its vectors stay, its matrices stream in tiles.
What streams has its source on disk, or unit by unit in host memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from qoff.checkpoint import Checkpoint, QuantEntry, WeightFile
from qoff.errors import ArgumentError

from .image import Image, make_image
from .tiles import read_bytes, slot_bytes, split_rows, tile_image, tiles_of
from .units import (
    EMBEDDING,
    HEAD,
    LM_HEAD,
    Tile,
    Unit,
    WholeUnit,
    is_expert,
    local_names,
    tile_source,
    unit_files,
    unit_weights,
)


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
    tiles: tuple[Tile, ...] = ()  # of all tiled units, in the order of computation
    host: frozenset[Unit] = frozenset()  # streamed from host memory; EMBEDDING: its rows
    host_weight_bytes: int = 0
    host_staging: int = 0  # buffers in host memory for what goes from disk to the device
    host_staging_bytes: int = 0  # of all of them

    @property
    def device_bytes(self) -> int:
        """Bytes of the device arena, all purposes together."""
        slots = self.slots * self.slot_bytes
        return self.resident_bytes + slots + self.staging_bytes + self.workspace

    @property
    def host_bytes(self) -> int:
        """Bytes of the host arena."""
        return self.host_weight_bytes + self.host_staging_bytes

    @property
    def tiled(self) -> frozenset[WholeUnit]:
        """The units whose matrices stream in tiles."""
        return frozenset(tile.unit for tile in self.tiles)


def residency_of(
    checkpoint: Checkpoint,
    resident: Iterable[str],
    slots: int = 2,
    workspace: int = 0,
    packing: str = "rows16",
    tile_bytes: int | None = None,
) -> Residency:
    """The residency that keeps the named weights, and what it takes in bytes.

    A unit that would stream more than `tile_bytes` streams in tiles of at most that, or of 32 rows,
    and its vectors stay too; but not one with experts. Raises ArgumentError for fewer than two
    slots or a name the checkpoint does not have.
    """
    if slots < 2:
        raise ArgumentError(f"{slots} slots are too few: one is read while another is in use")
    files = unit_files(checkpoint)
    kept = set(resident)
    known = {name for file in files.values() for name in file.weights}
    if not kept <= known:
        raise ArgumentError(f"not in {checkpoint.path}: {', '.join(sorted(kept - known))}")
    tiles: list[Tile] = []
    resident_bytes = slot = staging = 0
    for unit, file in files.items():
        streamed = streamed_image(checkpoint, unit, kept, packing)
        if _in_tiles(streamed, tile_bytes):
            assert streamed is not None
            assert tile_bytes is not None
            matrices = _matrices(file, streamed.raw)
            kept.update(name for name in streamed.raw if name not in matrices)
            for name, entry in matrices.items():
                rows = split_rows(entry, packing, tile_bytes)
                tiles += tiles_of(unit, _called(unit, name), entry, rows)
                slot = max(slot, slot_bytes(entry, packing, rows))
                if entry.packing != packing:
                    staging = max(staging, read_bytes(entry, rows))
        elif streamed is not None:
            slot = max(slot, streamed.nbytes)
            staging = max(staging, streamed.raw_bytes * streamed.repacked)
        for image in resident_images(file, kept & set(file.weights), packing):
            resident_bytes += image.nbytes
            staging = max(staging, image.raw_bytes * image.repacked)
    return Residency(
        frozenset(kept),
        slots if slot else 0,
        slot,
        resident_bytes,
        staging,
        workspace,
        packing,
        tuple(tiles),
    )


def _in_tiles(streamed: Image | None, tile_bytes: int | None) -> bool:
    """Whether what a unit streams is too large for one piece, and can be cut."""
    if streamed is None or tile_bytes is None or streamed.nbytes <= tile_bytes:
        return False
    return not any(is_expert(name) for name in streamed.raw)


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
    checkpoint: Checkpoint, unit: WholeUnit, resident: Collection[str], packing: str
) -> Image | None:
    """How the weights that a unit streams lie in one slot; None if all of them are resident."""
    names = [name for name in unit_weights(checkpoint, unit) if name not in resident]
    return make_image(unit_files(checkpoint)[unit], names, packing) if names else None


def streamed_images(checkpoint: Checkpoint, plan: Residency) -> dict[Unit, Image]:
    """All that streams, in the order of computation, and how it lies in a slot."""
    images: dict[Unit, Image] = {}
    tiled = plan.tiled
    for unit in unit_files(checkpoint):
        if unit in tiled:
            for tile in (t for t in plan.tiles if t.unit == unit):
                images[tile] = tile_image(*tile_source(checkpoint, tile), tile, plan.packing)
        else:
            image = streamed_image(checkpoint, unit, plan.resident, plan.packing)
            if image is not None:
                images[unit] = image
    return images


def host_images(checkpoint: Checkpoint, plan: Residency) -> dict[Unit, Image]:
    """All that host memory holds and how it lies there: in the order of computation, then rows."""
    images = {u: i for u, i in streamed_images(checkpoint, plan).items() if u in plan.host}
    if EMBEDDING in plan.host:
        images[EMBEDDING] = rows_image(checkpoint)
    return images


def rows_image(checkpoint: Checkpoint) -> Image:
    """How an embedding lies whose rows are gathered: as in its file."""
    entry = checkpoint.outer.weights[EMBEDDING]
    packing = entry.packing if isinstance(entry, QuantEntry) else ""
    return make_image(checkpoint.outer, [EMBEDDING], packing)


def _matrices(file: WeightFile, names: Iterable[str]) -> dict[str, QuantEntry]:
    """The quantized ones among some weights of a file, in file order."""
    wanted = set(names)
    return {
        name: entry
        for name, entry in file.weights.items()
        if name in wanted and isinstance(entry, QuantEntry)
    }


def _called(unit: WholeUnit, name: str) -> str:
    """What computations call a matrix of a unit; the tied embedding is the head's."""
    if unit == HEAD and name == EMBEDDING:
        return LM_HEAD
    return local_names(unit, [name])[name]
