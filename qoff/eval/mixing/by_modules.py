"""Sensitivities of models that run through transformers' modules."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qoff.errors import QuantizationError
from qoff.models.convert.modules import ModulesJob
from qoff.models.convert.unconverted_modules import UnconvertedModules
from qoff.models.modules.structure import Matrix
from qoff.models.sources import GGUFModulesSource, ModulesSource
from qoff.quant import Format, QTensor, QuantConfig, quantize_as

from .sensitivity import Products, Sensitivities, check_size, choices, drawn

_GROUP = 32  # that divides the columns of what is given a format
_ROWS = 64  # whose predictions are compared at a time


class ModuleSensitivities(Sensitivities[list[Tensor]]):
    """Measures one model on texts, int64 [texts, tokens], each of which is a batch of its own.

    Arguments as those of `native.NativeSensitivities`. The predictions of the model as it is are in
    a file without a name, four bytes for each token of the vocabulary. Raises as `ModulesJob` and
    `check_size` do, and QuantizationError for weights that are quantized already.
    """

    def __init__(
        self,
        source: ModulesSource,
        ids: Tensor,
        quant: QuantConfig | None = None,
        calibration: Tensor | None = None,
        trust_remote_code: bool = False,
        bits: float | None = None,
    ) -> None:
        if isinstance(source, GGUFModulesSource) and source.quantized:
            raise QuantizationError(
                f"{source.path}: is quantized already; choose formats for the model of which it "
                "was made"
            )
        self._quant = replace(quant or QuantConfig(), weights={})
        self._source, self._trust, self._calibration = source, trust_remote_code, calibration
        config = source.config()
        self._model = UnconvertedModules(source, config, self._quant, trust_remote_code, _GROUP)
        self._texts = ids.split(1)
        self.layers = self._model.units - 1
        shapes = [matrix.shape for i in range(self.layers) for matrix in self._matrices(i)]
        if not shapes:
            raise QuantizationError(
                f"{source.path}: no group size divides the columns of a matrix in its layers, so "
                "there is no format to choose; leave the target out"
            )
        if bits is not None:
            check_size(bits, shapes)
        self._called: dict[int, str] = {}
        self._products: dict[str, Products] = {}
        self._run = self._model.run(self._texts, self._seen)
        for layer in range(self.layers):
            self._run.layer(layer, self._model.floats(layer))
        self._predict(torch.Generator().manual_seed(0))

    def _predict(self, random: torch.Generator) -> None:
        """Keep what the model predicts, and the gradients of what it draws from that."""
        head, gradients = self._model.floats(self.layers)[self._model.head], []
        self._likely = list[np.memmap[Any, Any]]()
        for i in range(len(self._texts)):
            logits = self._run.logits(i, head, gradient=True)
            gradients.append(drawn(logits, self._run.final(i), random))
            with tempfile.TemporaryFile() as file:
                kept = np.memmap(file, np.float32, "w+", shape=tuple(logits.shape))
            kept[:] = logits.detach().log_softmax(-1).numpy()
            self._likely.append(kept)
        self._gradients = gradients
        self.tokens = sum(len(one) for one in self._likely)

    @torch.no_grad()
    def measured(self, weights: Mapping[str, Format]) -> float:
        """See `Sensitivities.measured`."""
        quant = replace(self._quant, weights=weights)

        def built(layer: int) -> dict[str, QTensor | Tensor]:
            found: dict[str, QTensor | Tensor] = {}
            for name, x in self._model.floats(layer).items():
                form = quant.chosen(name)
                found[name] = x if form is None else self._quantized(x, form, name)
            return found

        return self._lost(built)

    @torch.no_grad()
    def solved(self, weights: Mapping[str, Format]) -> float:
        """See `Sensitivities.solved`."""
        if self._calibration is None:
            return self.measured(weights)
        quant, config = replace(self._quant, weights=weights), self._source.config()
        job = ModulesJob(self._source, config, quant, self._trust, self._calibration)
        return self._lost(job.build)

    def _lost(self, built: Callable[[int], Mapping[str, QTensor | Tensor]]) -> float:
        """The loss with the weights of each layer that `built` returns, in order."""
        run, total = self._model.run(self._texts, written=True), 0.0
        for layer in range(self.layers):
            run.layer(layer, built(layer))
        for i, kept in enumerate(self._likely):
            found = run.logits(i, self._head).log_softmax(-1)
            for p, q in zip(torch.from_numpy(kept).split(_ROWS), found.split(_ROWS), strict=True):
                total += float((p.exp() * (p - q)).sum(dtype=torch.float64))
        return total / self.tokens

    @cached_property
    def _head(self) -> QTensor | Tensor:
        """The head as it is stored."""
        model = self._model
        floats, matrices = model.read(self.layers)
        for matrix, weight in matrices:
            if matrix.name == model.head:
                return model.quantized(matrix, matrix.of(weight))
        return floats[model.head]

    def _matrices(self, layer: int) -> list[Matrix]:
        return [matrix for matrix in self._model.matrices(layer) if not matrix.fixed]

    def _weights(self, layer: int) -> dict[str, Tensor]:
        return self._model.floats(layer)

    def _choices(self, layer: int) -> dict[str, list[str]]:
        return choices([matrix.name for matrix in self._matrices(layer)])

    def _quantized(self, matrix: Tensor, form: Format, name: str) -> QTensor:
        return quantize_as(form, matrix, self._quant, name)

    def _drawn_gradient(self) -> list[Tensor]:
        return self._gradients

    def _seen(self, matrix: object, x: Tensor, y: Tensor) -> None:
        inputs, into = x.detach().clone(), self._products.setdefault(self._called[id(matrix)], [])
        y.register_hook(lambda g: into.append((inputs, g)))

    def _back(
        self, layer: int, weights: Mapping[str, Tensor], gradient: Sequence[Tensor]
    ) -> tuple[list[Tensor], dict[str, Products]]:
        self._called = {id(x): name for name, x in weights.items()}
        products = self._products = {}
        return self._run.back(layer, weights, gradient), products
