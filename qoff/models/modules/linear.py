"""Linear modules that compute on the packed weights they are bound."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from qoff.kernels.layout.qtensor import QTensor
from qoff.kernels.ops import Ops
from qoff.memory import HEAD, TiledMatrix
from qoff.memory.plan import LM_HEAD

from .configs import DTYPE
from .passes import by_tiles, current

Bound: TypeAlias = QTensor | Tensor | TiledMatrix


@dataclass(frozen=True)
class Multiply:
    """x @ W.T + bias by the op."""

    ops: Ops

    def __call__(self, x: Tensor, matrix: Bound, bias: Tensor | None) -> Tensor:
        """x: float32 [..., K]. Returns [..., N]."""
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        count = matrix.shape[0]
        out = x.new_empty(len(rows), count)
        if isinstance(matrix, Tensor):
            out = nn.functional.linear(rows, matrix.to(x.dtype), bias)
        elif isinstance(matrix, TiledMatrix):
            for tile, some in by_tiles(matrix):
                of_tile = slice(tile.first_row, tile.stop)
                out[:, of_tile] = self(rows, some, None if bias is None else bias[of_tile])
        elif len(rows):
            out = self.ops.w4_linear(rows, matrix, bias=bias)
        return out.view(*x.shape[:-1], count)


def dense(matrix: Bound) -> Tensor:
    """A matrix in float32 [N, K], for code that looks into it."""
    if isinstance(matrix, Tensor):
        return matrix.to(DTYPE)
    if isinstance(matrix, TiledMatrix):
        return torch.cat([tile.dequantize() for _, tile in by_tiles(matrix)])
    return matrix.dequantize()


class QuantizedLinear(nn.Module):
    """Stands for a linear layer while `bound` and `bias` are set.

    transposed: the layer that it replaces keeps its weight as [K, N].
    """

    def __init__(self, replaced: nn.Module, multiply: Multiply, transposed: bool) -> None:
        super().__init__()
        shape = tuple(replaced.weight.shape)  # type: ignore[arg-type]  # of a linear layer
        self.out_features, self.in_features = shape[::-1] if transposed else shape
        self.bound: Bound | None = None
        self.bias: Tensor | None = None
        self._multiply, self._transposed = multiply, transposed

    @property
    def weight(self) -> Tensor:
        """The dense weight, as the replaced layer has it; computed anew each time."""
        assert self.bound is not None
        found = dense(self.bound)
        return found.T if self._transposed else found

    def forward(self, x: Tensor) -> Tensor:
        """x: float32 [..., K]. Returns [..., N]."""
        assert self.bound is not None
        return self._multiply(x, self.bound, self.bias)


class Head(nn.Module):
    """The head: fetches its weights when it is called, and computes only the logits wanted.

    Whatever the shape of its input [B, T, K], it returns [1, R, N].
    """

    def __init__(self, replaced: nn.Linear, multiply: Multiply) -> None:
        super().__init__()
        self.bias: Tensor | None = replaced.bias
        self.weight = torch.empty_like(replaced.weight, device="meta")  # some ask for its dtype
        self._multiply = multiply

    def forward(self, x: Tensor) -> Tensor:
        """x: float32 [B, T, K]."""
        sequences, columns = current().logit_rows
        rows = x[sequences, columns]
        matrix = current().fetch(HEAD)[LM_HEAD]
        return self._multiply(rows, matrix, self.bias)[None]
