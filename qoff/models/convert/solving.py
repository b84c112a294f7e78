"""Matrices that are solved when their inputs are known, while a text goes through the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from qoff.kernels.layout.qtensor import QTensor
from qoff.kernels.ops import ops_for
from qoff.quant import Format, quantize
from qoff.quant.compensated import aimed, compensated, moments

_PACKING = "rows16"  # of the kernel that multiplies by it at once


@dataclass
class Moments:
    """Second moments of the inputs that were seen last: matrices that share them come in a row."""

    _key: tuple[int, ...] = ()
    _inputs: Tensor | None = None  # kept, so that no other's are at their address
    _found: Tensor | None = None
    _apart: Tensor | None = None

    def of(self, x: Tensor) -> Tensor:
        """The sum of x x^T over rows, float32 [K, K]. x: float32 [M, K]."""
        key = x.data_ptr(), *x.shape, x._version
        if key != self._key or self._found is None:
            self._key, self._inputs = key, x
            self._found = self._apart = None  # the last ones are free before these
            self._found = moments(x)
        return self._found

    def apart(self, x: Tensor, other: Tensor) -> Tensor:
        """The sum of (x' - x) x^T over rows, float32 [K, K]. other: x', [M, K], the same for x."""
        self.of(x)
        if self._apart is None:
            self._apart = (other - x).T @ x
        return self._apart


@dataclass
class Unsolved:
    """A matrix of the source, solved for the first inputs it meets.

    read: its values, float32. name: what errors call it. twice: half of all inputs are those of the
    source's model, see `products`.
    """

    name: str
    shape: tuple[int, int]
    form: Format
    scale_dtype: torch.dtype
    moments: Moments
    read: Callable[[], Tensor]
    twice: bool = False
    _found: QTensor | None = field(default=None, init=False)

    def solved(self, x: Tensor) -> QTensor:
        """The matrix [N, K] in packing rows16. x: float32 [M, K]; no rows: solved later."""
        if not x.numel():
            return self.result().to_packing(_PACKING)
        if self._found is None:
            self._solve(self.read(), x)
        return self.result()

    def products(self, x: Tensor, count: int, gap: Tensor | None = None) -> Tensor:
        """Outputs [M, N] for inputs x [M, K] of two models: the one that is solved, and the source.

        The first `count` rows are of the former, as many behind them are what the source has in
        their place, and all others are the source's, too. It is solved such that outputs of the
        first come near those of the second and, beside that, make up for gap, [count, N].
        """
        w, mine, others = self.read(), x[:count], x[count:]
        out = x.new_empty(len(x), len(w))
        torch.mm(others, w.T, out=out[count:])
        if count and self._found is None:
            if gap is None and len(w) > w.shape[1]:  # less work for matrices that are high
                missing = w @ self.moments.apart(mine, others[:count])
            else:
                apart = out[count : 2 * count] - mine @ w.T
                missing = (apart if gap is None else apart.add_(gap)).T @ mine
                del apart
            self._solve(aimed(w, self.moments.of(mine), missing, count, self.name), mine)
        if count:
            ops_for(x.device).w4_linear(mine, self.result(), out=out[:count])
        return out

    def _solve(self, w: Tensor, x: Tensor) -> None:
        hessian, dtype = self.moments.of(x), self.scale_dtype
        found = compensated(w, hessian, self.form, scale_dtype=dtype, name=self.name)
        self._found = found.to_packing(_PACKING)

    def dequantize(self) -> Tensor:
        """Its values as they are now, for code that looks into it."""
        return self.read() if self._found is None else self._found.dequantize()

    def result(self) -> QTensor:
        """What it became; without its inputs if there were none."""
        if self._found is not None:
            return self._found
        form, dtype = self.form, self.scale_dtype
        return quantize(self.read(), form.bits, form.group_size, scale_dtype=dtype, name=self.name)


def results(
    given: Mapping[str, QTensor | Tensor | Unsolved], packing: str
) -> dict[str, QTensor | Tensor]:
    """What matrices became, in a packing."""
    found = {k: x.result() if isinstance(x, Unsolved) else x for k, x in given.items()}
    return {k: x.to_packing(packing) if isinstance(x, QTensor) else x for k, x in found.items()}
