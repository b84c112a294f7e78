"""What one unit takes of the device: its weights that stay, and slots for what streams."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Self

from qoff.checkpoint import QuantEntry, WeightFile

from .image import Image, make_image
from .tiles import bytes_of_tile, read_bytes, slot_bytes, split_rows
from .units import (
    Tile,
    Unit,
    WholeUnit,
    by_turn,
    expert_number,
    is_expert,
    is_whole,
    tiled_name,
    unit_weights,
)


@dataclass(frozen=True, eq=False)
class UnitPlan:
    """What one unit keeps on the device and how the rest of it streams, with the bytes of each.

    cuts: matrices that stream in tiles, by their names in the file, with the rows of a tile.
    """

    kept: frozenset[str]
    cuts: tuple[tuple[str, int], ...]
    resident_bytes: int
    slot_bytes: int  # 0 when nothing streams
    staging_bytes: int


@dataclass(frozen=True)
class Total:
    """Bytes of the device that all units take together, with one slot."""

    resident: int
    slot: int
    staging: int
    layers_tiled: bool

    @classmethod
    def of(cls, units: Sequence[UnitPlan]) -> Self:
        """units: the layers, then the head."""
        return cls(
            sum(unit.resident_bytes for unit in units),
            max(unit.slot_bytes for unit in units),
            max(unit.staging_bytes for unit in units),
            any(unit.cuts for unit in units[:-1]),
        )


def plan_unit(
    unit: WholeUnit,
    file: WeightFile,
    kept: Collection[str],
    packing: str,
    tile_bytes: int | None,
    one_by_one: bool = False,
) -> UnitPlan:
    """What a unit takes that keeps those of its file's weights that are in `kept`.

    Its vectors, and matrices that are read whole, stay as well if it would stream more than
    `tile_bytes` and is cut into tiles.
    one_by_one: without its experts, which a cache has.
    """
    kept = file.weights.keys() & kept
    if one_by_one:
        kept = {name for name in kept if expert_number(name) is None}
    streamed = streamed_image(unit, file, kept, packing, one_by_one)
    cuts: list[tuple[str, int]] = []
    slot = staging = 0
    if streamed is None:
        pass
    elif (
        tile_bytes is None
        or streamed.nbytes <= tile_bytes
        or (not one_by_one and any(map(is_expert, streamed.raw)))
    ):
        slot, staging = streamed.nbytes, streamed.raw_bytes * streamed.repacked
    else:
        for name in by_turn(unit, streamed.raw):
            entry = file.weights[name]
            if not isinstance(entry, QuantEntry) or is_whole(name):
                kept.add(name)
                continue
            rows = split_rows(entry, packing, tile_bytes)
            cuts.append((name, rows))
            slot = max(slot, slot_bytes(entry, packing, rows))
            if entry.packing != packing:
                staging = max(staging, read_bytes(entry, rows))
    resident = kept_images(file, kept, packing)
    staging = max([staging, *(image.raw_bytes for image in resident if image.repacked)])
    nbytes = sum(image.nbytes for image in resident)
    return UnitPlan(frozenset(kept), tuple(cuts), nbytes, slot, staging)


def streamed_bytes(
    unit: WholeUnit, file: WeightFile, plan: UnitPlan, packing: str
) -> dict[Unit, int]:
    """Bytes in a slot of what a unit streams, in the order of computation."""
    if not plan.cuts:
        return {unit: plan.slot_bytes} if plan.slot_bytes else {}
    found = dict[Unit, int]()
    for name, rows in plan.cuts:
        entry, label = file.weights[name], tiled_name(unit, name)
        assert isinstance(entry, QuantEntry)
        for first in range(0, entry.shape[0], rows):
            tile = Tile(unit, label, first, min(rows, entry.shape[0] - first))
            found[tile] = bytes_of_tile(file, entry, tile, packing)
    return found


def kept_images(file: WeightFile, names: Collection[str], packing: str) -> list[Image]:
    """How resident weights of one file lie: together as read, or each alone when repacked."""
    if not names:
        return []
    together = make_image(file, names, packing)
    if not together.repacked:
        return [together]
    return [make_image(file, [name], packing) for name in file.weights if name in names]


def streamed_image(
    unit: WholeUnit, file: WeightFile, resident: Collection[str], packing: str, one_by_one: bool
) -> Image | None:
    """How the weights that a unit streams lie in one slot; None if all of them are resident."""
    names = [name for name in unit_weights(unit, file) if name not in resident]
    if one_by_one:
        names = [name for name in names if expert_number(name) is None]
    return make_image(file, names, packing) if names else None
