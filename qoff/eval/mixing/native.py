"""Sensitivities of models that the native decoder runs."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from qoff.errors import QuantizationError, UnsupportedModelError
from qoff.kernels.layout.packing import GROUP_SIZES
from qoff.models.convert.builder import Builder
from qoff.models.convert.calibration import Calibration
from qoff.models.convert.layerwise import Layerwise
from qoff.models.convert.unconverted import Unconverted
from qoff.quant import Format, QTensor, QuantConfig

from .sensitivity import Products, Sensitivities, check_size, choices, drawn


class NativeSensitivities(Sensitivities[Tensor]):
    """Measures one model on texts, int64 [texts, tokens].

    quant: the solver, and the packing that sizes are counted in.
    calibration: texts, with which a solver that calibrates quantizes where the loss of a whole mix
    is measured; single formats are compared without it. bits: a size to check before that.
    requantize: see `convert`.

    Raises as `Layerwise`, `check_size` and `Builder.check` do, QuantizationError for weights that
    are quantized already, and UnsupportedModelError for models whose layers share keys or have
    embeddings of their own.
    """

    def __init__(
        self,
        model: Unconverted,
        ids: Tensor,
        quant: QuantConfig | None = None,
        calibration: Tensor | None = None,
        bits: float | None = None,
        requantize: bool = False,
    ) -> None:
        index = model.spec.index
        shares = model.spec.shared_kv or (index is not None and not all(index.layers))
        if shares or model.spec.per_layer is not None:
            raise UnsupportedModelError(
                f"{model.spec.model_type}: its layers are given more than hidden states, so none "
                "can be looked at alone; choose its format by bits and group size"
            )
        self._model, self._calibration = model, calibration
        self._source, self._units = model.source, model.units
        self._quant = replace(quant or QuantConfig(), weights={})
        self._floats = Builder(model.source, self._quant, requantize=True)
        self._check_floats(requantize)
        if bits is not None:
            layers = [w for _, weights in self._units[:-1] for w in weights if not w.sensitive]
            check_size(bits, [(w.rows, w.columns) for w in layers if w.columns is not None])
        self._run = Layerwise(model.spec, ids)
        self.layers, self.tokens = model.spec.num_layers, self._run.ids.numel()
        self._random = torch.Generator().manual_seed(0)
        self._outer = {w.name: self._floats.floats(w) for w in self._units[-1][1]}
        self._forward()

    def _check_floats(self, requantize: bool) -> None:
        """Raise for what a conversion would refuse when all is measured."""
        whole = Builder(self._source, self._quant, requantize)
        narrow = replace(self._quant, group_size=min(GROUP_SIZES))
        chosen = Builder(self._source, narrow, requantize)  # what is given a format that fits it
        for prefix, weights in self._units:
            for weight in weights:
                (whole if weight.sensitive else chosen).check(prefix, [weight])
                if prefix and weight.columns is not None and whole.format(prefix, weight)[1]:
                    raise QuantizationError(
                        f"{self._source.path}: {prefix}{weight.name} is quantized already, "
                        "and its codes are taken over; choose formats for the model of which it "
                        "was made"
                    )

    @torch.no_grad()
    def _forward(self) -> None:
        """Run the model as it is; hidden states before each layer go to a file without a name."""
        hidden = self._run.embedded(lambda name, ids: self._outer[name][ids])
        shape = (self._run.spec.num_layers, *hidden.shape)
        with tempfile.TemporaryFile() as file:
            self._states = np.memmap(file, np.float32, "w+", shape=shape)
        for layer, before in enumerate(self._states):
            before[:] = hidden.numpy()
            hidden = self._run.run(layer, self._weights(layer), hidden)
        self._final = hidden

    @torch.no_grad()
    def measured(self, weights: Mapping[str, Format]) -> float:
        """See `Sensitivities.measured`."""
        builder = self._builder(weights)

        def built(layer: int) -> dict[str, QTensor | Tensor]:
            prefix, parts = self._units[layer]
            return {
                w.name: builder.build(prefix, w)
                if builder.quant.chosen(prefix + w.name)
                else self._floats.floats(w)
                for w in parts
            }

        return self._lost(builder, built)

    @torch.no_grad()
    def solved(self, weights: Mapping[str, Format]) -> float:
        """See `Sensitivities.solved`."""
        if self._calibration is None:
            return self.measured(weights)
        builder = self._builder(weights)
        calibration = Calibration(self._model, builder, self._calibration)

        def built(layer: int) -> dict[str, QTensor | Tensor]:
            prefix, _ = self._units[layer]
            found = calibration.layer(layer)
            return {name.removeprefix(prefix): weight for name, weight in found.items()}

        return self._lost(builder, built)

    def _builder(self, weights: Mapping[str, Format]) -> Builder:
        return Builder(self._source, replace(self._quant, weights=weights), True)

    def _lost(
        self, builder: Builder, built: Callable[[int], Mapping[str, QTensor | Tensor]]
    ) -> float:
        """The loss with the weights of each layer that `built` returns, in order."""
        stored = {w.name: builder.build("", w) for w in self._units[-1][1]}
        outer = {n: w.dequantize() if isinstance(w, QTensor) else w for n, w in stored.items()}
        hidden = self._run.embedded(lambda name, ids: outer[name][ids])
        for layer in range(self._run.spec.num_layers):
            hidden = self._run.run(layer, built(layer), hidden)
        return self._divergence(hidden, outer)

    def _weights(self, layer: int) -> dict[str, Tensor]:
        return {w.name: self._floats.floats(w) for w in self._units[layer][1]}

    def _choices(self, layer: int) -> dict[str, list[str]]:
        prefix, parts = self._units[layer]
        matrices = [w.name for w in parts if w.columns is not None and not w.sensitive]
        found = choices([prefix + name for name in matrices])
        return {name: [x.removeprefix(prefix) for x in alike] for name, alike in found.items()}

    def _quantized(self, matrix: Tensor, form: Format, name: str) -> QTensor:
        return self._floats.quantized(matrix, form, name)

    def _drawn_gradient(self) -> Tensor:
        out = []
        for rows in self._final.split(self._run.logit_rows):
            leaf = rows.detach().requires_grad_()
            with torch.enable_grad():
                out.append(drawn(self._run.logits(self._outer, leaf), leaf, self._random))
        return torch.cat(out)

    def _back(
        self, layer: int, weights: Mapping[str, Tensor], gradient: Tensor
    ) -> tuple[Tensor, dict[str, Products]]:
        called = {id(w): name for name, w in weights.items()}
        products: dict[str, Products] = {}

        def seen(matrix: object, x: Tensor, y: Tensor) -> None:
            inputs = x.detach().clone()
            into = products.setdefault(called[id(matrix)], [])
            y.register_hook(lambda g: into.append((inputs, g)))

        leaf = torch.from_numpy(self._states[layer].copy()).requires_grad_()
        with torch.enable_grad(), torch.autograd.graph.allow_mutation_on_saved_tensors():
            after = self._run.run(layer, weights, leaf, seen)
            (back,) = torch.autograd.grad(after, leaf, gradient)
        return back, products

    def _divergence(self, found: Tensor, outer: Mapping[str, Tensor]) -> float:
        """Mean KL divergence of the predictions from final hidden states and weights `outer`."""
        total = 0.0
        step = self._run.logit_rows
        for a, b in zip(self._final.split(step), found.split(step), strict=True):
            p = self._run.logits(self._outer, a).log_softmax(-1)
            q = self._run.logits(outer, b).log_softmax(-1)
            total += float((p.exp() * (p - q)).sum(dtype=torch.float64))
        return total / len(found)
