"""Matrices cut into tiles of rows, for devices that are too small for whole ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .layout import FlatUnit


@dataclass(frozen=True, eq=False)
class Tile:
    """Rows of a linear layer or an embedding, or of both.

    layer: the one that it is in; how many there are for what is outside of them. modules: whose
    weight has the rows. unit: its only parameter is theirs.
    """

    layer: int
    modules: tuple[nn.Module, ...]
    name: str
    rows: slice
    unit: FlatUnit

    @property
    def count(self) -> int:
        """Of its rows."""
        return int(self.rows.stop - self.rows.start)

    def reads(self, layers: int, pieces: int) -> tuple[int, int]:
        """How often its weights are read for a micro-batch, forward and backward.

        In a layer once, and backward once more as that is computed again; those of a head twice for
        the loss and its gradients, of each piece of tokens, of an embedding once.
        """
        if self.layer < layers:
            return 1, 2
        return sum(2 * pieces if isinstance(m, nn.Linear) else 1 for m in self.modules), 0

    def sums(self, layers: int, pieces: int) -> int:
        """How often a micro-batch adds to its gradient."""
        if self.layer < layers:
            return 1
        return sum(pieces if isinstance(m, nn.Linear) else 1 for m in self.modules)

    @property
    def weight(self) -> nn.Parameter:
        """The whole matrix, which has no memory while it is in tiles."""
        found: Any = self.modules[0].weight
        return found


def cut(
    layer: int,
    own: Mapping[str, nn.Parameter],
    users: Mapping[int, tuple[nn.Module, ...]],
    most: int,
) -> tuple[dict[str, nn.Parameter], list[Tile]]:
    """Parameters of a layer that stay whole, and tiles of up to `most` bytes, or a row, of others.

    users: modules whose forward may be replaced, by the identity of their weight; of all that have
    it.
    """
    whole, tiles = dict[str, nn.Parameter](), list[Tile]()
    for name, p in own.items():
        modules = users.get(id(p))
        if modules is None or p.nbytes <= most:
            whole[name] = p
            continue
        rows = max(1, most // p[0].nbytes)
        for start in range(0, len(p), rows):
            part = nn.Parameter(p.data[start : start + rows])
            found = slice(start, start + len(part))
            unit = FlatUnit(f"{name}[{start}:{found.stop}]", {name: part})
            tiles.append(Tile(layer, modules, name, found, unit))
    return whole, tiles


def whole_shapes(tiles: Iterable[Tile]) -> dict[str, torch.Size]:
    """Of the matrices that tiles are of, by name."""
    return {tile.name: tile.weight.shape for tile in tiles}


def by_matrix(tiles: Sequence[Tile], numbers: Iterable[int]) -> list[list[int]]:
    """Numbers of tiles, those of a matrix together."""
    found: dict[str, list[int]] = {}
    for j in numbers:
        found.setdefault(tiles[j].name, []).append(j)
    return list(found.values())
