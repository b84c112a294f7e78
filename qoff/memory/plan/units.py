"""Units: the steps of a forward pass as the weight store sees them, and the weights of each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from qoff.checkpoint import Checkpoint, QuantEntry, WeightFile

WholeUnit: TypeAlias = int | str  # a decoder layer's number, or HEAD


@dataclass(frozen=True)
class Tile:
    """Rows `first_row` .. `first_row + rows - 1` of one matrix of a unit larger than a slot."""

    unit: WholeUnit
    name: str  # the matrix as computations call it: "mlp.down_proj", "lm_head"
    first_row: int
    rows: int

    @property
    def stop(self) -> int:
        """The row after the last one."""
        return self.first_row + self.rows


Unit: TypeAlias = WholeUnit | Tile  # what streams as one


@dataclass(frozen=True)
class TiledMatrix:
    """Stands among a unit's weights for a matrix [N, K] that comes in tiles, one after another."""

    shape: tuple[int, int]
    tiles: tuple[Tile, ...]  # ascending, together all N rows


HEAD = "head"  # the outer weights: final norm, and head or tied embedding
EMBEDDING = "model.embed_tokens"
LM_HEAD = "lm_head"
_EXPERTS = ".mlp.experts."  # in the names of experts' weights


def unit_label(unit: Unit) -> str:
    """A unit as people call it."""
    if isinstance(unit, Tile):
        rows = f"{unit.first_row}..{unit.stop - 1}"
        return f"{unit_label(unit.unit)}, {unit.name} {rows}"
    return f"layer {unit}" if isinstance(unit, int) else unit


def unit_files(checkpoint: Checkpoint) -> dict[WholeUnit, WeightFile]:
    """The units in their default order, 0 .. L-1 and HEAD, and the file of each."""
    files: dict[WholeUnit, WeightFile] = dict(enumerate(checkpoint.layers))
    return {**files, HEAD: checkpoint.outer}


def unit_weights(checkpoint: Checkpoint, unit: WholeUnit) -> tuple[str, ...]:
    """Names of the weights a unit computes with, in file order.

    An untied embedding belongs to no unit: its rows are gathered (`WeightStore.gather_rows`).
    """
    if unit != HEAD:
        return tuple(checkpoint.layers[int(unit)].weights)
    names = tuple(checkpoint.outer.weights)
    return tuple(n for n in names if n != EMBEDDING or not has_own_head(checkpoint))


def has_own_head(checkpoint: Checkpoint) -> bool:
    """Whether there is a head besides the embedding (not tied)."""
    return LM_HEAD in checkpoint.outer.weights


def is_expert(name: str) -> bool:
    """Whether a weight is an expert's. Those of a layer lie together, and are never tiled."""
    return _EXPERTS in name


def placed_together(names: Iterable[str]) -> tuple[tuple[str, ...], ...]:
    """Weights of a layer file in the pieces that stay or stream as one: all experts are one."""
    pieces: list[tuple[str, ...]] = []
    for name in names:
        if pieces and is_expert(name) and is_expert(pieces[-1][0]):
            pieces[-1] = (*pieces[-1], name)
        else:
            pieces.append((name,))
    return tuple(pieces)


def local_names(unit: WholeUnit, weights: Iterable[str]) -> dict[str, str]:
    """File names to the names a computation uses: those of a layer lose "model.layers.<i>."."""
    prefix = f"model.layers.{unit}."
    return {name: name.removeprefix(prefix) for name in weights}


def tile_source(checkpoint: Checkpoint, tile: Tile) -> tuple[WeightFile, QuantEntry]:
    """The file that a tile is read from, and its whole matrix there; a tied head's embedding."""
    file = unit_files(checkpoint)[tile.unit]
    names = {local: name for name, local in local_names(tile.unit, file.weights).items()}
    entry = file.weights[names.get(tile.name, EMBEDDING)]
    assert isinstance(entry, QuantEntry)
    return file, entry


def tiled_matrices(
    checkpoint: Checkpoint, unit: WholeUnit, tiles: Iterable[Tile]
) -> dict[str, TiledMatrix]:
    """The matrices of a unit that come in tiles, by the names that computations use."""
    named: dict[str, list[Tile]] = {}
    for tile in tiles:
        if tile.unit == unit:
            named.setdefault(tile.name, []).append(tile)
    return {
        name: TiledMatrix(tile_source(checkpoint, parts[0])[1].shape, tuple(parts))
        for name, parts in named.items()
    }
