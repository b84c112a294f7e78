"""What a model loses when a matrix of it is quantized: an estimate for every matrix and format.

The loss is the Kullback-Leibler divergence of the predicted tokens, in nats a token. To second
order it is half the mean square of g . e, summed over outputs of the matrix: e the error of an
output on a text, g the gradient of the log-likelihood there, for tokens drawn from the model's own
prediction (the Fisher information). Products of two outputs, or of two tokens, are left out: errors
of rounding have any sign, so they are 0 in the mean, and noise on a short text.

That takes one pass forward and one backward for all matrices and formats, a layer at a time, with
one layer in float32 in memory. Every fourth row of a large matrix stands for the others. Products
of two outputs are not 0 for all kinds of matrices: an error of a key is the same for all queries.
So the estimates of each kind (QKV, output, up, down) are scaled to the true loss of all matrices of
that kind together, one pass forward for each.

The experts of a layer have one format: a matrix of each is one choice, estimated by those experts
that read most of the text.
"""

from __future__ import annotations

import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, TypeVar

import torch
from torch import Tensor

from qoff.errors import ArgumentError, QuantizationError
from qoff.plan.forms import stored_bits
from qoff.quant import Format, QTensor

FORMATS = (
    Format(2, 32),
    Format(3, 64),
    Format(3, 32),
    Format(4, 128),
    Format(4, 64),
    Format(4, 32),
    Format(5, 64),
    Format(5, 32),
    Format(6, 64),
    Format(6, 32),
    Format(8, 128),
    Format(8, 64),
)
_EXPERTS = 16  # of a layer that stand for all
_ROWS, _EACH = 128, 4  # of a matrix that stand for all: so many at least, and one of so many
logger = logging.getLogger(__name__)
Products = list[tuple[Tensor, Tensor]]  # inputs [M, K] and gradients of outputs [M, N]
Progress = Callable[[int, int], None]  # layers done, layers in all
Gradient = TypeVar("Gradient")  # by what comes out of a layer


@dataclass(frozen=True)
class Sensitivity:
    """What one matrix costs in each format that it can have: bytes, and nats a token.

    name: a pattern of names (`fnmatch`) for the experts of a layer, which have one format.
    """

    name: str
    weights: int
    nbytes: Mapping[Format, int]
    loss: Mapping[Format, float]


class Sensitivities(ABC, Generic[Gradient]):
    """Measures one model on texts. layers: how many there are; tokens: of the texts."""

    layers: int
    tokens: int

    def of(
        self, formats: Sequence[Format] = FORMATS, progress: Progress | None = None
    ) -> list[Sensitivity]:
        """Estimate the loss of each matrix of the layers in each format whose group fits it.

        In file order. progress: of the way back, which takes most of the time. Raises
        QuantizationError where no group fits a matrix.
        """
        found: list[Sensitivity] = []
        gradient = self._drawn_gradient()
        for done, layer in enumerate(reversed(range(self.layers)), 1):
            weights = self._weights(layer)
            gradient, products = self._back(layer, weights, gradient)
            found = self._losses(layer, weights, products, formats) + found
            if progress is not None:
                progress(done, self.layers)
        return self._scaled(found)

    @abstractmethod
    def measured(self, weights: Mapping[str, Format]) -> float:
        """Return the true mean loss, nats a token, with formats by the names of matrices.

        Embedding and head are quantized as they are stored, layers' other matrices are not.
        """

    @abstractmethod
    def solved(self, weights: Mapping[str, Format]) -> float:
        """The same with formats for all matrices of layers, calibrated on the texts for that."""

    @abstractmethod
    def _weights(self, layer: int) -> dict[str, Tensor]:
        """Weights of a layer as floats."""

    @abstractmethod
    def _choices(self, layer: int) -> Mapping[str, Sequence[str]]:
        """What of `_weights` has one format, by its name or pattern in full."""

    @abstractmethod
    def _quantized(self, matrix: Tensor, form: Format, name: str) -> QTensor:
        """A matrix without calibration."""

    @abstractmethod
    def _drawn_gradient(self) -> Gradient:
        """The gradient of the log-likelihood of drawn tokens by the final hidden states."""

    @abstractmethod
    def _back(
        self, layer: int, weights: Mapping[str, Tensor], gradient: Gradient
    ) -> tuple[Gradient, Mapping[str, Products]]:
        """The gradient before a layer, and inputs and gradients of the outputs of its matrices."""

    def _scaled(self, found: Sequence[Sensitivity]) -> list[Sensitivity]:
        """Estimates whose sum over a kind of matrix, in small formats, is what it loses.

        With fewer than 4 bits a whole kind would lose too much for what holds to second order.
        """
        kinds: dict[str, list[Sensitivity]] = {}
        for one in found:
            kinds.setdefault(_kind(one.name), []).append(one)
        nothing, factors = self.measured({}), {}
        for kind, ones in kinds.items():
            small = {one.name: min(one.nbytes, key=partial(_size, one)) for one in ones}
            estimate = sum(one.loss[small[one.name]] for one in ones)
            loss = self.measured(small) - nothing
            factors[kind] = loss / estimate if loss > 0 and estimate > 0 else 1.0
        return [
            replace(one, loss={f: x * factors[_kind(one.name)] for f, x in one.loss.items()})
            for one in found
        ]

    @torch.no_grad()
    def _losses(
        self,
        layer: int,
        weights: Mapping[str, Tensor],
        products: Mapping[str, Products],
        formats: Sequence[Format],
    ) -> list[Sensitivity]:
        found = []
        for name, alike in self._choices(layer).items():
            rows = {one: sum(len(x) for x, _ in products.get(one, ())) for one in alike}
            most = sorted(alike, key=rows.__getitem__, reverse=True)[:_EXPERTS]
            share = sum(rows[one] for one in most) / max(1, sum(rows.values()))
            (n, k), losses, sizes = weights[most[0]].shape, {}, {}
            some = slice(0, n, min(_EACH, max(1, n // _ROWS)))
            count = len(range(n)[some])
            parts = {one: weights[one][some] for one in most}
            for form in (form for form in formats if k % form.group_size == 0):
                total = 0.0
                for one, part in parts.items():
                    q = self._quantized(part, form, name)
                    seen = [(x, gradient[:, some]) for x, gradient in products.get(one, ())]
                    total += _squares(q.dequantize().sub_(part), seen)
                losses[form] = total * n / count / (2 * self.tokens * (share or 1.0))
                sizes[form] = q.nbytes * n // count * len(alike)
            if not sizes:
                raise QuantizationError(
                    f"{name}: no group size of {', '.join(map(str, formats))} divides its "
                    f"{k} columns"
                )
            if not any(rows.values()):  # code that looks into it tells nothing
                widest = max(sizes, key=sizes.__getitem__)
                losses, sizes = {widest: 0.0}, {widest: sizes[widest]}
            found.append(Sensitivity(name, n * k * len(alike), sizes, losses))
        return found


def _size(one: Sensitivity, form: Format) -> tuple[bool, int]:
    return form.bits < 4, one.nbytes[form]


def check_size(bits: float, shapes: Iterable[tuple[int, int]]) -> None:
    """Raise ArgumentError for fewer bits a weight than formats of matrices [N, K] can take.

    Warns of more than they can take. A shape that no group divides is left out.
    """
    least = most = weights = 0.0
    for n, k in shapes:
        forms = [form for form in FORMATS if k % form.group_size == 0]
        sizes = [stored_bits(form.bits, form.group_size) for form in forms]
        if sizes:
            least, most = least + n * k * min(sizes), most + n * k * max(sizes)
            weights += n * k
    if bits * weights < least:
        raise ArgumentError(
            f"{bits:g} bits a weight are too few; the smallest formats take {least / weights:.3f}, "
            "scales and minima included"
        )
    if bits * weights > most > 0:
        logger.warning(
            "%g bits a weight are more than formats can take; the largest take %.3f, scales and "
            "minima included",
            bits,
            most / weights,
        )


def drawn(logits: Tensor, leaf: Tensor, random: torch.Generator) -> Tensor:
    """The gradient by `leaf` of the log-likelihood of drawn tokens, summed over `logits` [R, V]."""
    likely = logits.log_softmax(-1)
    tokens = torch.multinomial(likely.detach().exp(), 1, generator=random)
    return torch.autograd.grad(likely.gather(1, tokens).sum(), leaf)[0]


def choices(names: Sequence[str]) -> dict[str, list[str]]:
    """Full names of matrices by what has one format: the experts' of a layer by a pattern."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(_EXPERT.sub(r"\1*", name), []).append(name)
    return found


_EXPERT = re.compile(r"(\.experts\.(?:\w+_proj\.)?)\d+")  # the expert's number, first or last


def _kind(name: str) -> str:
    """What a matrix is called in every layer."""
    return re.sub(r"\.\d+\.", ".", name, count=1)


def _squares(error: Tensor, products: Sequence[tuple[Tensor, Tensor]]) -> float:
    """The sum over tokens of the squared change of the log-likelihood.

    error: of a matrix, [N, K].
    """
    total = 0.0
    for x, gradient in products:
        total += float((x @ error.T).mul_(gradient).square_().sum(dtype=torch.float64))
    return total
