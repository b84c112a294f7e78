"""The quantized linear of a decoder, whose matrix may come in tiles of rows, one after another."""

from __future__ import annotations

from collections.abc import Generator
from functools import partial
from typing import cast

from torch import Tensor

from qoff.kernels.layout.qtensor import QTensor
from qoff.kernels.ops import Ops
from qoff.memory import Tile, TiledMatrix, Unit, Weights
from qoff.models.forward_pass import ForwardPass

Steps = Generator[Unit, Weights, Tensor]
ALL = slice(None)


class Linear:
    """f(norm(x) @ W.T + bias) on the weights that a forward pass was handed.

    eps: of RMSNorms that are fused.
    """

    def __init__(self, ops: Ops, eps: float) -> None:
        self._ops, self._eps = ops, eps

    def __call__(
        self,
        run: ForwardPass,
        weights: Weights,
        name: str,
        x: Tensor | None = None,
        *,
        out: Tensor | None = None,
        part: slice = ALL,
        adds: bool = False,
        norm: Tensor | None = None,
        silu_mul: bool = False,
    ) -> Steps:
        """Return the result, in `out` if there is one.

        Without x, the input is the hidden states of the tokens `part`; with `adds` the result is
        added to them. A matrix in tiles is multiplied tile by tile; meanwhile the hidden states are
        where the batch keeps them.
        """
        matrix, bias = weights[name], vector(weights, f"{name}.bias")
        if not isinstance(matrix, TiledMatrix):
            here = x
            if x is None or adds:
                hidden = run.input
                every = part in (ALL, slice(0, len(hidden)))
                here = hidden if every else hidden[part]
            return self._ops.w4_linear(
                cast(Tensor, here if x is None else x),
                cast(QTensor, matrix),
                norm=norm,
                eps=self._eps,
                bias=bias,
                residual=here if adds else None,
                silu_mul=silu_mul,
                out=here if adds else out,
            )
        call = partial(self._ops.w4_linear, norm=norm, eps=self._eps, silu_mul=silu_mul)
        share = 2 if silu_mul else 1  # rows for a column of the result
        direct = self._ops.USES_OUT  # such ops take columns of a larger matrix
        for tile in matrix.tiles:
            rows = yield from fetch(run, tile)
            source = run.input[part] if x is None else x
            if out is None and not adds:
                out = source.new_empty(len(source), matrix.shape[0] // share)
            whole = run.input[part] if adds else cast(Tensor, out)
            target = whole[:, tile.first_row // share : tile.stop // share]
            added = (target if direct else target.contiguous()) if adds else None
            some = call(
                source,
                rows,
                bias=None if bias is None else bias[tile.first_row : tile.stop],
                residual=added,
                out=target if direct else None,
            )
            if not direct:
                target.copy_(some)
        return run.input[part] if adds else cast(Tensor, out)


def fetch(run: ForwardPass, tile: Tile) -> Generator[Unit, Weights, QTensor]:
    """Wait for a tile, with the hidden states put away meanwhile."""
    if run.hidden is not None:
        run.activations.store(run.hidden)
    weights = yield tile
    if run.hidden is not None:
        run.hidden = run.activations.load()
    return cast(QTensor, weights[tile.name])


def vector(weights: Weights, name: str) -> Tensor | None:
    """A dense weight, None where this model has none of that name."""
    return cast("Tensor | None", weights.get(name))


def tiled(weights: Weights) -> bool:
    """Whether any matrix comes in tiles."""
    return any(isinstance(weight, TiledMatrix) for weight in weights.values())
