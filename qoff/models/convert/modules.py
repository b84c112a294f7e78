"""Converting a model without a spec, a layer at a time, under transformers' own tensor names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor

from qoff.models.modules.configs import LAYOUT
from qoff.models.modules.structure import Matrix, Parts
from qoff.models.sources import ModulesSource
from qoff.quant import QTensor, QuantConfig

from .builder import with_uniform_experts
from .loss import LossProbe
from .module_loss import ModuleLoss
from .solving import Moments, Unsolved, results
from .unconverted_modules import UnconvertedModules


class ModulesJob:
    """A conversion to a checkpoint of layout "modules"; see `convert._NativeJob`."""

    def __init__(
        self,
        source: ModulesSource,
        config: Mapping[str, Any],
        quant: QuantConfig,
        trust_remote_code: bool,
        calibration: Tensor | None = None,
        probe: LossProbe | None = None,
    ) -> None:
        self._quant = quant
        self._model = UnconvertedModules(source, config, quant, trust_remote_code)
        self.units = self._model.units
        self.expected = self._model.weights * quant.bits // 8
        matrices = [m for unit in range(self.units) for m in self._model.matrices(unit)]
        self._twice = not any(map(_is_of_mixture, matrices))
        self._calibration = None
        if calibration is not None:
            texts = torch.cat((calibration,) * (1 + self._twice))
            self._calibration = self._model.run([texts])
        self._loss = None if probe is None else ModuleLoss.of(probe, self._model)

    def build(self, unit: int) -> dict[str, QTensor | Tensor]:
        """Return the weights of a unit by their names, floats first."""
        model, outer = self._model, unit + 1 == self.units
        calibration = None if outer else self._calibration
        moments = Moments()
        floats, matrices = model.read(unit)
        given: dict[str, QTensor | Tensor | Unsolved] = {**floats}
        for matrix, weight in matrices:
            if calibration is not None and not matrix.fixed:
                given[matrix.name] = self._unsolved(matrix, weight, moments)
            else:
                given[matrix.name] = model.quantized(matrix, matrix.of(weight))
        if calibration is not None:
            calibration.layer(unit, given)
        elif self._calibration is not None:
            self._calibration.close()
        built = with_uniform_experts(results(given, self._quant.packing))
        if self._loss is not None:
            own = {**floats, **{matrix.name: matrix.of(weight) for matrix, weight in matrices}}
            self._loss.unit(unit, own, built)
        return built

    def config(self) -> dict[str, Any]:
        """The `config.json` of the checkpoint."""
        quant = self._quant
        chosen = {name: asdict(form) for name, form in quant.weights.items()}
        return {
            **self._model.config,
            "quantization_config": {
                "layout": LAYOUT,
                "bits": quant.bits,
                "group_size": quant.group_size,
                "solver": quant.solver,
                "packing": quant.packing,
                **({"weights": chosen} if chosen else {}),
            },
        }

    def _unsolved(self, matrix: Matrix, weight: Parts, moments: Moments) -> Unsolved:
        form, dtype = self._model.form(matrix), self._quant.scale_dtype
        read = partial(matrix.of, weight)
        return Unsolved(matrix.name, matrix.shape, form, dtype, moments, read, self._twice)


def _is_of_mixture(matrix: Matrix) -> bool:
    """Whether rows of it are chosen: other ones by the source's model than by a quantized one."""
    return matrix.expert is not None or matrix.routes or ".experts." in matrix.name
