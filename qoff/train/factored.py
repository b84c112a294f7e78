"""Adafactor (arXiv 1804.04235): means of squared gradients by rows and columns of each matrix.

A step goes through a unit's gradients three times, for the means, for the size of the update, which
is clipped by parameter, and for the update itself: a run of whole rows at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .layout import PIECE, FlatUnit
from .optimizers import FactoredRule


@dataclass(frozen=True)
class Run:
    """Whole rows of a matrix, from `start` to `stop` in the flat unit. first: the first row's."""

    parameter: int
    matrix: int  # of the parameter's
    first: int
    start: int
    stop: int


class FactoredMoments:
    """The means of a unit's parameters, and the mean square of each parameter's weights.

    memory: float32, of `count(unit)` elements. A parameter [..., N, K] has matrices [N, K] with
    means [N] and [K]; a vector has a mean for each element.
    """

    def __init__(self, unit: FlatUnit, memory: Tensor) -> None:
        self.runs, self._memory = list(runs(unit)), memory
        self._sizes = _sizes(unit)
        self._numbers = [matrices * n * k for matrices, n, k, _ in self._sizes]
        self._squares = memory[: len(self._sizes)]
        self._rows: list[Tensor] = []
        self._columns: list[Tensor | None] = []
        self._scales: list[float] = []
        at = len(self._sizes)
        for matrices, n, k, factored in self._sizes:
            size, more = (n, k) if factored else (k, 0)
            middle, end = at + matrices * size, at + matrices * (size + more)
            self._rows.append(memory[at:middle].view(matrices, size))
            self._columns.append(memory[middle:end].view(matrices, k) if factored else None)
            at = end

    def begin(self, weights: Tensor) -> None:
        """Before the first step. weights: flat."""
        self._memory.zero_()
        for run in self.runs:
            self._add_square(run, weights[run.start : run.stop])

    def prepare(self, rule: FactoredRule, grad: Tensor) -> None:
        """Take the gradients into the means, and find how large updates are. grad: flat."""
        sums = [torch.zeros_like(x) if x is not None else None for x in self._columns]
        for run in self.runs:
            g = self._view(run, grad).float() * rule.grad_scale
            g.square_()
            rows, of_columns = self._rows[run.parameter][run.matrix], sums[run.parameter]
            if of_columns is None:
                rows.lerp_(g[0], rule.share)
            else:
                rows[run.first : run.first + len(g)].lerp_(g.mean(1), rule.share)
                of_columns[run.matrix] += g.sum(0)
        for (_, n, _, _), columns, total in zip(self._sizes, self._columns, sums, strict=True):
            if columns is not None and total is not None:
                columns.lerp_(total / n, rule.share)
        squares = [0.0] * len(self._sizes)
        for run in self.runs:
            squares[run.parameter] += float(self._update(rule, run, grad).double().square().sum())
        means, self._scales = self._squares.tolist(), []
        for square, mean, number in zip(squares, means, self._numbers, strict=True):
            size = math.sqrt(square / number) / rule.size
            self._scales.append(rule.rate * max(rule.eps[1], math.sqrt(mean)) / max(1.0, size))
        self._squares.zero_()

    def step(self, rule: FactoredRule, run: Run, weights: Tensor, grad: Tensor) -> None:
        """Change weights, float32, of a run, by flat gradients of the unit; after `prepare`."""
        update = self._update(rule, run, grad).view(-1)
        weights.mul_(rule.keep).add_(update, alpha=-self._scales[run.parameter])
        self._add_square(run, weights)

    def _update(self, rule: FactoredRule, run: Run, grad: Tensor) -> Tensor:
        """Gradients [rows, K] over the roots of their means."""
        g, eps = self._view(run, grad), rule.eps[0]
        rows, columns = self._rows[run.parameter][run.matrix], self._columns[run.parameter]
        if columns is None:
            mean = rows[None].clone()
        else:
            share = rows[run.first : run.first + len(g), None] / rows.mean().clamp(min=eps)
            mean = share * columns[run.matrix]
        return mean.clamp_(min=eps * eps).rsqrt_().mul_(g).mul_(rule.grad_scale)

    def _add_square(self, run: Run, weights: Tensor) -> None:
        total = weights.double().square().sum() / self._numbers[run.parameter]
        self._squares[run.parameter] += total.float()

    def _view(self, run: Run, grad: Tensor) -> Tensor:
        return grad[run.start : run.stop].view(-1, self._sizes[run.parameter][2])


def count(unit: FlatUnit) -> int:
    """Elements of a unit's `FactoredMoments`."""
    each = [n * (rows + k) if factored else k for n, rows, k, factored in _sizes(unit)]
    return len(each) + sum(each)


def runs(unit: FlatUnit) -> Iterator[Run]:
    """All rows of all matrices of a unit, about a million weights at a time."""
    for i, (start, (matrices, n, k, _)) in enumerate(
        zip(unit.starts.values(), _sizes(unit), strict=True)
    ):
        rows = max(1, PIECE // k)
        for matrix in range(matrices):
            for first in range(0, n, rows):
                last = min(n, first + rows)
                at = start + matrix * n * k
                yield Run(i, matrix, first, at + first * k, at + last * k)


def _sizes(unit: FlatUnit) -> list[tuple[int, int, int, bool]]:
    """Of each parameter: matrices, rows and columns, and whether they have means of their own."""
    found = []
    for shape in unit.shapes.values():
        if len(shape) < 2:
            found.append((1, 1, shape.numel(), False))
        else:
            found.append((shape[:-2].numel(), shape[-2], shape[-1], True))
    return found
