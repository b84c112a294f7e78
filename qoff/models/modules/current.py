"""The pass that is being computed, for modules that fetch weights.

greenlet, and so `passes`, is imported where a pass runs: the native decoder does without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

from qoff.kernels.layout.qtensor import QTensor
from qoff.memory import Tile, TiledMatrix

if TYPE_CHECKING:
    from .passes import ModulePass


def current() -> ModulePass:
    """The pass that is being computed."""
    from greenlet import getcurrent

    from .passes import ModulePass

    here = getcurrent()
    assert isinstance(here, ModulePass)
    return here


def by_tiles(matrix: TiledMatrix) -> Iterator[tuple[Tile, QTensor]]:
    """Fetch all tiles of a matrix; each is valid until the next one is asked for."""
    for tile in matrix.tiles:
        yield tile, cast(QTensor, current().fetch(tile)[tile.name])
