"""Steps of tiles, one after another in the thread that steps units."""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial

from torch import Tensor

from qoff.kernels.cpu.optim.update import Rule

from .cuts import by_matrix
from .optimizers import FactoredRule
from .tiles import Tiles
from .updates import Updater


class TileSteps:
    """Has the tiles of a layer stepped. before: how many units the updater has before them."""

    def __init__(self, tiles: Tiles, updater: Updater, before: int) -> None:
        self._tiles, self._updater, self._before = tiles, updater, before

    def submit(self, layer: int, rule: Rule | FactoredRule) -> list[Future[None]]:
        """Step all, by their complete gradients."""
        tiles, updater, before = self._tiles, self._updater, self._before
        done = []
        for numbers in by_matrix(tiles.tiles, tiles.layers.get(layer, ())):
            if isinstance(rule, FactoredRule):
                units = [before + j for j in numbers]
                done.append(updater.prepare(units, rule, self._gradients, self._give_back))
            for j in numbers:
                to_step, grad = partial(tiles.to_step, j), partial(tiles.gradients, j)
                unit, then = tiles.tiles[j].unit, partial(tiles.stepped, j)
                done.append(updater.submit(before + j, unit, rule, to_step, grad, then))
        return done

    def _gradients(self, i: int) -> Tensor:
        return self._tiles.gradients(i - self._before)

    def _give_back(self, i: int) -> None:
        self._tiles.give_back(i - self._before)
