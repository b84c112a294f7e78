"""What a conversion for transformers' modules loses; see `loss`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import torch
from torch import Tensor

from qoff.quant import QTensor

from .loss import Divergence, LossProbe
from .unconverted_modules import UnconvertedModules

_ROWS = 64  # whose predictions are compared at a time


class ModuleLoss:
    """Follows a conversion with two runs of the model's code, of the source and of what is built.

    Tells `probe`. Memory holds the logits of both for the text.
    """

    def __init__(self, probe: LossProbe, model: UnconvertedModules, ids: Tensor) -> None:
        self._probe, self._head, self._last = probe, model.head, model.units - 1
        self._own, self._written = (model.run([ids[None]], written=x) for x in (False, True))

    @classmethod
    def of(cls, probe: LossProbe, model: UnconvertedModules) -> Self | None:
        """None where nothing is measured; see `LossProbe`."""
        layer = max(model.weights_of(unit) for unit in range(model.units - 1))
        held = 4 * (2 * layer + model.weights_of(model.units - 1))
        logits = 2 * 4 * model.vocabulary
        ids = probe.sample(model.weights, model.vocabulary, model.positions, held, logits)
        return None if ids is None else cls(probe, model, ids)

    def unit(
        self, index: int, own: Mapping[str, Tensor], built: Mapping[str, QTensor | Tensor]
    ) -> None:
        """After a unit was built; both: its weights by their full names."""
        if index < self._last:
            self._own.layer(index, own)
            self._written.layer(index, built)
            return
        logits = [
            run.logits(0, weights[self._head])
            for run, weights in ((self._own, own), (self._written, built))
        ]
        self._probe.done(divergence(*logits))


def divergence(own: Tensor, other: Tensor) -> Tensor:
    """KL(own || other) of rows of logits, [R, vocabulary] each: float64 [R]."""
    found = []
    for p, q in zip(own.split(_ROWS), other.split(_ROWS), strict=True):
        one = Divergence(len(p))
        one.add(p, q)
        found.append(one.result())
    return torch.cat(found)
