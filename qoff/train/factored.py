"""Adafactor (arXiv 1804.04235): means of squared gradients by rows and columns of each matrix.

A step goes through gradients three times, for the means, for the size of the update, which is
clipped by parameter, and for the update itself. Matrices whose rows are whole vectors go through
`kernels.cpu.optim.rows`; what else there is, through torch, a run of whole rows at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from qoff.kernels.cpu.optim import rows as kernel

from .layout import PIECE, FlatUnit
from .optimizers import FactoredRule


@dataclass(frozen=True)
class Run:
    """Whole rows of a matrix, from `start` to `stop` in flat memory. first: the first row's."""

    parameter: int
    matrix: int  # of the parameter's
    first: int
    start: int
    stop: int


Parts: TypeAlias = Callable[[], Iterable[tuple[Sequence[Run], Tensor]]]


class FactoredMoments:
    """The means of some parameters, and the mean square of each parameter's weights.

    memory: float32, of `count(shapes)` elements, which becomes 0. A parameter [..., N, K] has
    matrices [N, K] with means [N] and [K]; a vector has a mean for each element.
    """

    def __init__(self, shapes: Iterable[torch.Size], memory: Tensor) -> None:
        self._memory = memory.zero_()
        self._sizes = _sizes(shapes)
        self._numbers = [matrices * n * k for matrices, n, k, _ in self._sizes]
        self._squares = memory[: len(self._sizes)]
        self._rows: list[Tensor] = []
        self._columns: list[Tensor | None] = []
        self._scales: list[float] = []
        self._factors: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # by parameter and matrix
        at = len(self._sizes)
        for matrices, n, k, factored in self._sizes:
            size, more = (n, k) if factored else (k, 0)
            middle, end = at + matrices * size, at + matrices * (size + more)
            self._rows.append(memory[at:middle].view(matrices, size))
            self._columns.append(memory[middle:end].view(matrices, k) if factored else None)
            at = end

    def begin(self, runs: Iterable[Run], weights: Tensor) -> None:
        """Before the first step; all runs once. weights: flat memory that they are of."""
        for run in runs:
            total = weights[run.start : run.stop].double().square().sum()
            self._add_square(run, float(total))

    def prepare(self, rule: FactoredRule, parts: Parts) -> None:
        """Take gradients into the means, and find how large updates are.

        parts: gives runs and the flat gradients that they are of, two times; of all parameters.
        """
        sums = [torch.zeros_like(x) if x is not None else None for x in self._columns]
        for runs, grad in parts():
            for run in self._spans(runs):
                self._take(rule, run, self._view(run, grad), sums[run.parameter])
        for (_, n, _, _), columns, total in zip(self._sizes, self._columns, sums, strict=True):
            if columns is not None and total is not None:
                columns.lerp_(total / n, rule.share)
        self._factors = {
            (i, matrix): self._roots(rule, i, matrix)
            for i, (matrices, _, _, _) in enumerate(self._sizes)
            if self._is_whole(i)
            for matrix in range(matrices)
        }
        squares = [0.0] * len(self._sizes)
        for runs, grad in parts():
            for run in self._spans(runs):
                squares[run.parameter] += self._size(rule, run, grad)
        means, self._scales = self._squares.tolist(), []
        for square, mean, number in zip(squares, means, self._numbers, strict=True):
            size = math.sqrt(square / number) / rule.size
            self._scales.append(rule.rate * max(rule.eps[1], math.sqrt(mean)) / max(1.0, size))
        self._squares.zero_()

    def step(
        self, rule: FactoredRule, run: Run, weights: Tensor, grad: Tensor, copy: Tensor | None
    ) -> None:
        """Change weights, float32, of a run, by flat gradients that it is of; after `prepare`.

        copy: becomes the new weights, rounded.
        """
        scale = self._scales[run.parameter]
        if self._is_whole(run.parameter):
            k, given = self._sizes[run.parameter][2], self._factors_of(run)
            rounded = None if copy is None else copy.view(-1, k)
            found = kernel.step(
                weights.view(-1, k), self._view(run, grad), *given, _most(rule), rule.keep, scale,
                rounded,
            )  # fmt: skip
            self._add_square(run, float(found.double().sum()))
            return
        weights.mul_(rule.keep).add_(self._update(rule, run, grad).view(-1), alpha=-scale)
        if copy is not None:
            copy.copy_(weights)
        self._add_square(run, float(weights.double().square().sum()))

    def _take(self, rule: FactoredRule, run: Run, g: Tensor, of_columns: Tensor | None) -> None:
        """The squares of a run's gradients into the means of rows, and the sums of columns."""
        rows = self._rows[run.parameter][run.matrix]
        if of_columns is None:
            rows.lerp_((g[0].float() * rule.grad_scale).square_(), rule.share)
            return
        if self._is_whole(run.parameter):
            of_rows, total = kernel.squares(g, rule.grad_scale)
        else:
            squared = (g.float() * rule.grad_scale).square_()
            of_rows, total = squared.sum(1), squared.sum(0)
        rows[run.first : run.first + len(g)].lerp_(of_rows / g.shape[1], rule.share)
        of_columns[run.matrix] += total

    def _roots(self, rule: FactoredRule, i: int, matrix: int) -> tuple[Tensor, Tensor]:
        """What the kernels multiply gradients by: reciprocal roots of rows' and columns' means."""
        rows, columns = self._rows[i][matrix], self._columns[i]
        assert columns is not None
        shares = rows / rows.mean().clamp(min=rule.eps[0])
        return shares.rsqrt_().mul_(rule.grad_scale), columns[matrix].rsqrt()

    def _size(self, rule: FactoredRule, run: Run, grad: Tensor) -> float:
        """The sum of the squares of a run's updates."""
        if self._is_whole(run.parameter):
            found = kernel.size(self._view(run, grad), *self._factors_of(run), _most(rule))
            return float(found.double().sum())
        return float(self._update(rule, run, grad).double().square().sum())

    def _factors_of(self, run: Run) -> tuple[Tensor, Tensor]:
        of_rows, of_columns = self._factors[run.parameter, run.matrix]
        count = (run.stop - run.start) // self._sizes[run.parameter][2]
        return of_rows[run.first : run.first + count], of_columns

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

    def _add_square(self, run: Run, total: float) -> None:
        self._squares[run.parameter] += total / self._numbers[run.parameter]

    def _is_whole(self, i: int) -> bool:
        """Whether the kernels take a parameter: a matrix whose rows are whole vectors."""
        _, _, k, factored = self._sizes[i]
        return factored and k % kernel.LINE == 0

    def _spans(self, runs: Sequence[Run]) -> Iterator[Run]:
        """Runs, where kernels take them all that are of a matrix as one."""
        last: Run | None = None
        for run in runs:
            if last is not None and self._follows(last, run):
                last = replace(last, stop=run.stop)
                continue
            if last is not None:
                yield last
            last = run
        if last is not None:
            yield last

    def _follows(self, last: Run, run: Run) -> bool:
        same = (last.parameter, last.matrix) == (run.parameter, run.matrix)
        return same and last.stop == run.start and self._is_whole(run.parameter)

    def _view(self, run: Run, grad: Tensor) -> Tensor:
        return grad[run.start : run.stop].view(-1, self._sizes[run.parameter][2])


@dataclass(frozen=True)
class FactoredPart:
    """What is stepped together. alone: whether its runs are all that the moments are of."""

    moments: FactoredMoments
    runs: Sequence[Run]
    alone: bool = True


def count(shapes: Iterable[torch.Size]) -> int:
    """Elements of the `FactoredMoments` of parameters."""
    each = [n * (rows + k) if factored else k for n, rows, k, factored in _sizes(shapes)]
    return len(each) + sum(each)


def runs(unit: FlatUnit, row: int = 0) -> Iterator[Run]:
    """All rows of all matrices of a unit, about a million weights at a time.

    row: of the whole matrix, where the unit is a part of one that begins there.
    """
    sizes = _sizes(unit.shapes.values())
    for i, (start, (matrices, n, k, _)) in enumerate(zip(unit.starts.values(), sizes, strict=True)):
        rows = max(1, PIECE // k)
        for matrix in range(matrices):
            for first in range(0, n, rows):
                last = min(n, first + rows)
                at = start + matrix * n * k
                yield Run(i, matrix, row + first, at + first * k, at + last * k)


def _most(rule: FactoredRule) -> float:
    """What a gradient is multiplied by at most."""
    return rule.grad_scale / rule.eps[0] if rule.eps[0] else math.inf


def _sizes(shapes: Iterable[torch.Size]) -> list[tuple[int, int, int, bool]]:
    """Of each parameter: matrices, rows and columns, and whether they have means of their own."""
    found = []
    for shape in shapes:
        if len(shape) < 2:
            found.append((1, 1, shape.numel(), False))
        else:
            found.append((shape[:-2].numel(), shape[-2], shape[-1], True))
    return found
