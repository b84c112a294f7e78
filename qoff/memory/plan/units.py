"""Units: the steps of a forward pass as the weight store sees them, and the weights of each."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
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


@dataclass(frozen=True)
class Expert:
    """The matrices of one expert of a layer: what a cache of experts holds and brings."""

    layer: int
    number: int


@dataclass(frozen=True)
class ChosenExperts:
    """Experts that the tokens of a pass still want of a layer; some of them come at a time.

    guesses: experts that the next layer with any may want, to be read meanwhile.
    """

    layer: int
    numbers: tuple[int, ...]  # ascending
    guesses: tuple[Expert, ...] = ()


Unit: TypeAlias = WholeUnit | Tile | ChosenExperts | Expert  # what streams as one


@dataclass(frozen=True)
class TiledMatrix:
    """Stands among a unit's weights for a matrix [N, K] that comes in tiles, one after another."""

    shape: tuple[int, int]
    tiles: tuple[Tile, ...]  # ascending, together all N rows


HEAD = "head"  # the outer weights: final norm, and head or tied embedding
EMBEDDING = "model.embed_tokens"
LM_HEAD = "lm_head"
PER_LAYER = "model.embed_tokens_per_layer"  # a row for each token and layer
_EXPERTS = ".mlp.experts."  # in the names of experts' weights
_KINDS = "(gate_up_proj|up_proj|down_proj)"
_MATRIX = re.compile(rf"\.experts\.(?:(\d+)\.{_KINDS}|{_KINDS}\.(\d+))$")
# Come before all others.
_FIRST = ("embed_positions", "streams.split.", "per_layer.context", "mtp.proj")
_WHOLE = ".self_attn.kv_b_proj"  # the end of the name of a matrix that is read whole


def unit_label(unit: Unit) -> str:
    """A unit as messages and timelines name it."""
    if isinstance(unit, Expert):
        return f"layer {unit.layer}, expert {unit.number}"
    if isinstance(unit, ChosenExperts):
        return f"layer {unit.layer}, experts"
    if isinstance(unit, Tile):
        rows = f"{unit.first_row}..{unit.stop - 1}"
        return f"{unit_label(unit.unit)}, {unit.name} {rows}"
    return f"layer {unit}" if isinstance(unit, int) else unit


def unit_files(checkpoint: Checkpoint) -> dict[WholeUnit, WeightFile]:
    """The units in their default order, 0 .. L-1 and HEAD, and the file of each."""
    files: dict[WholeUnit, WeightFile] = dict(enumerate(checkpoint.layers))
    return {**files, HEAD: checkpoint.outer}


def unit_weights(unit: WholeUnit, file: WeightFile) -> tuple[str, ...]:
    """Names of the weights in its file that a unit computes with, in file order.

    Tables belong to no unit: their rows are gathered (`WeightStore.gather_rows`).
    """
    if unit != HEAD:
        return tuple(file.weights)
    tables = row_tables(file)
    return tuple(name for name in file.weights if name not in tables)


def row_tables(outer: WeightFile) -> tuple[str, ...]:
    """The outer weights that nothing but rows is read of: untied embeddings, and those of layers.

    They are on the device only where everything is.
    """
    tables = (EMBEDDING, PER_LAYER) if LM_HEAD in outer.weights else (PER_LAYER,)
    return tuple(name for name in tables if name in outer.weights)


def is_expert(name: str) -> bool:
    """Whether a weight is an expert's. Those of a layer lie together, and are never tiled."""
    return _EXPERTS in name or expert_matrix(name) is not None


def expert_matrix(name: str) -> tuple[int, str] | None:
    """The expert whose matrix a weight is, and what that is called, "gate_up_proj", "up_proj" or
    "down_proj"; None for all others: biases are of all experts.

    In checkpoints for transformers' modules the number comes last.
    """
    found = _MATRIX.search(name)
    if found is None:
        return None
    return (int(found[1]), found[2]) if found[1] else (int(found[4]), found[3])


def is_whole(name: str) -> bool:
    """Whether a matrix never streams in tiles: latent attention reads parts of it twice."""
    return name.endswith(_WHOLE)


def expert_number(name: str) -> int | None:
    """The expert whose matrix a weight is, None for all others."""
    found = expert_matrix(name)
    return None if found is None else found[0]


def placed_together(names: Iterable[str], one_by_one: bool = False) -> tuple[tuple[str, ...], ...]:
    """Weights of a layer file in the pieces that stay or stream as one: all experts are one.

    one_by_one: the matrices of experts are in no piece, as a cache has them.
    """
    if one_by_one:
        return tuple((name,) for name in names if expert_number(name) is None)
    pieces: list[tuple[str, ...]] = []
    for experts, group in groupby(names, key=is_expert):
        together = tuple(group)
        pieces += [together] if experts else [(name,) for name in together]
    return tuple(pieces)


def local_names(unit: WholeUnit, weights: Iterable[str]) -> dict[str, str]:
    """File names to the names a computation uses: those of a layer lose "model.layers.<i>."."""
    prefix = f"model.layers.{unit}."
    return {name: name.removeprefix(prefix) for name in weights}


def tiled_name(unit: WholeUnit, name: str) -> str:
    """What computations call a matrix that comes in tiles; the tied embedding is the head."""
    if unit == HEAD and name == EMBEDDING:
        return LM_HEAD
    return local_names(unit, [name])[name]


def by_turn(unit: WholeUnit, names: Iterable[str]) -> list[str]:
    """Names in the file of matrices of a unit in the order in which they are used."""
    return sorted(names, key=lambda name: not tiled_name(unit, name).startswith(_FIRST))


def stored_matrix(unit: WholeUnit, file: WeightFile, name: str) -> QuantEntry:
    """The matrix in a unit's file for which `tiled_name` is `name`."""
    names = {tiled_name(unit, stored): stored for stored in unit_weights(unit, file)}
    entry = file.weights[names[name]]
    assert isinstance(entry, QuantEntry)
    return entry
