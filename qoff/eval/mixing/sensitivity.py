"""What a model loses when a matrix of it is quantized: an estimate for every matrix and format.

The loss is the Kullback-Leibler divergence of the predicted tokens, in nats a token. To second
order it is half the mean square of g . e, summed over outputs of the matrix: e the error of an
output on a text, g the gradient of the log-likelihood there, for tokens drawn from the model's own
prediction (the Fisher information). Products of two outputs, or of two tokens, are left out: errors
of rounding have any sign, so they are 0 in the mean, and noise on a short text.

That takes one pass forward and one backward for all matrices and formats, a layer at a time, with
one layer in float32 in memory. What is left out is not 0 for all kinds of matrices: an error of a
key is the same for all queries. So the estimates of each kind (QKV, output, up, down) are scaled to
the true loss of all matrices of that kind together, one pass forward for each.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from qoff.errors import QuantizationError, UnsupportedModelError
from qoff.models.convert.builder import Builder
from qoff.models.convert.calibration import Calibration
from qoff.models.convert.layerwise import Layerwise
from qoff.models.convert.unconverted import Unconverted
from qoff.quant import Format, QTensor, QuantConfig

FORMATS = (
    Format(4, 128),
    Format(4, 64),
    Format(4, 32),
    Format(6, 128),
    Format(6, 64),
    Format(6, 32),
    Format(8, 128),
    Format(8, 64),
)
_Products = list[tuple[Tensor, Tensor]]  # inputs [M, K] and gradients of outputs [M, N]
Progress = Callable[[int, int], None]  # layers done, layers in all


@dataclass(frozen=True)
class Sensitivity:
    """What one matrix costs in each format that it can have: bytes, and nats a token."""

    name: str
    weights: int
    nbytes: Mapping[Format, int]
    loss: Mapping[Format, float]


class Sensitivities:
    """Measures one model on texts, int64 [texts, tokens].

    quant: the solver, and the packing that sizes are counted in. seed: of the tokens drawn.
    calibration: texts, with which a solver that calibrates quantizes where the loss of a whole mix
    is measured; single formats are compared without it.

    Raises as `Layerwise` does, QuantizationError for weights that are quantized already, and
    UnsupportedModelError for mixtures of experts and models with embeddings of layers.
    """

    def __init__(
        self,
        model: Unconverted,
        ids: Tensor,
        quant: QuantConfig | None = None,
        seed: int = 0,
        calibration: Tensor | None = None,
    ) -> None:
        if model.spec.experts is not None:
            raise UnsupportedModelError(
                f"{model.spec.model_type}: a mixture of experts is given one format; choose it by "
                "bits and group size"
            )
        if model.spec.shared_kv or model.spec.per_layer is not None:
            raise UnsupportedModelError(
                f"{model.spec.model_type}: its layers are given more than hidden states, so none "
                "can be looked at alone; choose its format by bits and group size"
            )
        self._model, self._calibration = model, calibration
        self._source, self._units = model.source, model.units
        self._quant = replace(quant or QuantConfig(), weights={})
        self._floats = Builder(model.source, self._quant, requantize=True)
        self._check_floats()
        self._run = Layerwise(model.spec, ids)
        self._random = torch.Generator().manual_seed(seed)
        self._outer = {w.name: self._floats.floats(w) for w in self._units[-1][1]}
        self._forward()

    def _check_floats(self) -> None:
        for prefix, weights in self._units[:-1]:
            for weight in weights:
                if weight.columns is not None and self._floats.format(prefix, weight)[1]:
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

    def of(
        self, formats: Sequence[Format] = FORMATS, progress: Progress | None = None
    ) -> list[Sensitivity]:
        """Estimate the loss of each matrix of the layers in each format whose group fits it.

        In file order. progress: of the way back, which takes most of the time. Raises
        QuantizationError where no group fits a matrix.
        """
        found: list[Sensitivity] = []
        gradient, count = self._drawn_gradient(), len(self._states)
        for done, layer in enumerate(reversed(range(count)), 1):
            weights = self._weights(layer)
            gradient, products = self._back(layer, weights, gradient)
            found = self._losses(layer, weights, products, formats) + found
            if progress is not None:
                progress(done, count)
        return self._scaled(found)

    def _scaled(self, found: Sequence[Sensitivity]) -> list[Sensitivity]:
        """Estimates whose sum over a kind of matrix, in its smallest formats, is what it loses."""
        kinds: dict[str, list[Sensitivity]] = {}
        for one in found:
            kinds.setdefault(_kind(one.name), []).append(one)
        nothing, factors = self.measured({}), {}
        for kind, ones in kinds.items():
            smallest = {one.name: min(one.nbytes, key=one.nbytes.__getitem__) for one in ones}
            estimate = sum(one.loss[smallest[one.name]] for one in ones)
            loss = self.measured(smallest) - nothing
            factors[kind] = loss / estimate if loss > 0 and estimate > 0 else 1.0
        return [
            replace(one, loss={f: x * factors[_kind(one.name)] for f, x in one.loss.items()})
            for one in found
        ]

    @torch.no_grad()
    def measured(self, weights: Mapping[str, Format]) -> float:
        """Return the true mean loss, nats a token, with formats by the names of matrices.

        Embedding and head are quantized as they are stored, layers' other matrices are not.
        """
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
        """The same with formats for all matrices of layers, calibrated on the texts for that."""
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

    def _drawn_gradient(self) -> Tensor:
        """The gradient of the log-likelihood of drawn tokens by the final hidden states."""
        out = []
        for rows in self._final.split(self._run.logit_rows):
            leaf = rows.detach().requires_grad_()
            with torch.enable_grad():
                likely = self._run.logits(self._outer, leaf).log_softmax(-1)
                drawn = torch.multinomial(likely.detach().exp(), 1, generator=self._random)
                out += torch.autograd.grad(likely.gather(1, drawn).sum(), leaf)
        return torch.cat(out)

    def _back(
        self, layer: int, weights: Mapping[str, Tensor], gradient: Tensor
    ) -> tuple[Tensor, dict[str, _Products]]:
        """The gradient before a layer, and inputs and gradients of the outputs of its matrices."""
        called = {id(w): name for name, w in weights.items()}
        products: dict[str, _Products] = {}

        def seen(matrix: object, x: Tensor, y: Tensor) -> None:
            inputs = x.detach().clone()
            into = products.setdefault(called[id(matrix)], [])
            y.register_hook(lambda g: into.append((inputs, g)))

        leaf = torch.from_numpy(self._states[layer].copy()).requires_grad_()
        with torch.enable_grad(), torch.autograd.graph.allow_mutation_on_saved_tensors():
            after = self._run.run(layer, weights, leaf, seen)
            (back,) = torch.autograd.grad(after, leaf, gradient)
        return back, products

    @torch.no_grad()
    def _losses(
        self,
        layer: int,
        weights: Mapping[str, Tensor],
        products: Mapping[str, _Products],
        formats: Sequence[Format],
    ) -> list[Sensitivity]:
        prefix, parts = self._units[layer]
        found = []
        for weight in parts:
            if weight.columns is None or weight.sensitive:
                continue
            fitting = [form for form in formats if weight.columns % form.group_size == 0]
            name, matrix = prefix + weight.name, weights[weight.name]
            if not fitting:
                raise QuantizationError(
                    f"{name}: no group size of {', '.join(map(str, formats))} divides its "
                    f"{weight.columns} columns"
                )
            losses, sizes = {}, {}
            for form in fitting:
                q = self._floats.quantized(matrix, form, name)
                losses[form] = _loss(q.dequantize().sub_(matrix), products[weight.name])
                sizes[form] = q.nbytes
            found.append(Sensitivity(name, matrix.numel(), sizes, losses))
        return found

    def _divergence(self, found: Tensor, outer: Mapping[str, Tensor]) -> float:
        """Mean KL divergence of the predictions from final hidden states and weights `outer`."""
        total = 0.0
        step = self._run.logit_rows
        for a, b in zip(self._final.split(step), found.split(step), strict=True):
            p = self._run.logits(self._outer, a).log_softmax(-1)
            q = self._run.logits(outer, b).log_softmax(-1)
            total += float((p.exp() * (p - q)).sum(dtype=torch.float64))
        return total / len(found)


def _kind(name: str) -> str:
    """What a matrix is called in every layer."""
    return name.rpartition(".")[2]


def _loss(error: Tensor, products: _Products) -> float:
    """Half the mean square of the change of the log-likelihood, over tokens.

    error: of a matrix, [N, K].
    """
    total, tokens = 0.0, 0
    for x, gradient in products:
        total += float((x @ error.T).mul_(gradient).square_().sum(dtype=torch.float64))
        tokens += len(x)
    return total / (2 * tokens)
