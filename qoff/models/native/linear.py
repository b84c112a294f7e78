"""The quantized linear of a decoder, whose matrix may come in tiles of rows, one after another."""

from __future__ import annotations

from collections.abc import Generator
from typing import Literal, cast

from torch import Tensor

from qoff.kernels.layout.ending import PLAIN, Ending, Norm
from qoff.kernels.layout.qtensor import QTensor
from qoff.kernels.ops import Ops
from qoff.memory import Tile, TiledMatrix, Unit, Weights
from qoff.models.forward_pass import ForwardPass
from qoff.models.spec import DecoderSpec

Steps = Generator[Unit, Weights, Tensor]
Rows = Tensor | Literal["hidden"]  # the hidden states of the tokens `part`, wherever they are
ALL = slice(None)


class Linear:
    """norm(x) @ W.T + bias, and what follows, on the weights that a forward pass was handed."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops

    def __call__(
        self,
        run: ForwardPass,
        weights: Weights,
        name: str,
        x: Rows = "hidden",
        *,
        norm: Norm | None = None,
        end: Ending = PLAIN,
        residual: Rows | None = None,
        out: Rows | None = None,
        part: slice = ALL,
    ) -> Steps:
        """Return the result, in `out` if there is one.

        A matrix in tiles is multiplied tile by tile; meanwhile the hidden states are where the
        batch keeps them.
        """
        matrix, bias = weights[name], vector(weights, f"{name}.bias")
        if isinstance(matrix, TiledMatrix):
            return (
                yield from self._by_tiles(
                    run, name, matrix, bias, x, norm, end, residual, out, part
                )
            )
        matrix = cast(QTensor, matrix)
        added, source = _there(run, residual, part), cast(Tensor, _there(run, x, part))
        if name in run.added:
            rows = slice(0, matrix.shape[0])
            bias = self._with_adapters(run, name, source, rows, norm, bias, part)
        return self._ops.w4_linear(
            source,
            matrix,
            norm=norm,
            bias=bias,
            residual=added,
            end=end,
            out=added if out is residual else _there(run, out, part),
        )

    def _with_adapters(
        self,
        run: ForwardPass,
        name: str,
        x: Tensor,
        rows: slice,
        norm: Norm | None,
        bias: Tensor | None,
        part: slice,
    ) -> Tensor:
        """The bias of these rows of a matrix, for each token with what its adapter adds."""
        assert run.adapters is not None
        which = run.adapters.which[part]
        return self._ops.low_rank(x, run.added[name], which, rows, norm=norm, bias=bias)

    def _by_tiles(
        self,
        run: ForwardPass,
        name: str,
        matrix: TiledMatrix,
        bias: Tensor | None,
        x: Rows,
        norm: Norm | None,
        end: Ending,
        residual: Rows | None,
        out: Rows | None,
        part: slice,
    ) -> Steps:
        share = 2 if end.gated else 1  # rows for a column of the result
        direct = self._ops.USES_OUT  # such ops take columns of a larger matrix
        of_rows = end.post_norm or end.sum_norm  # when all columns are there
        assert end.post_norm is None or (end.score is None and not end.soft_cap)
        whole: Tensor | None = None
        for tile in matrix.tiles:
            rows = yield from fetch(run, tile)
            source = cast(Tensor, _there(run, x, part))
            if whole is None and (out is None or of_rows):
                whole = source.new_empty(len(source), matrix.shape[0] // share)
            into = whole if whole is not None else cast(Tensor, _there(run, out, part))
            columns = slice(tile.first_row // share, tile.stop // share)
            target = into[:, columns]
            added = None if end.post_norm else _there(run, residual, part)
            if added is not None:
                added = added[:, columns] if direct else added[:, columns].contiguous()
            here = slice(tile.first_row, tile.stop)
            plus = None if bias is None else bias[here]
            if name in run.added:
                plus = self._with_adapters(run, name, source, here, norm, plus, part)
            some = self._ops.w4_linear(
                source,
                rows,
                norm=norm,
                bias=plus,
                residual=added,
                end=end.by_element,
                out=target if direct else None,
            )
            if not direct:
                target.copy_(some)
        there = _there(run, out, part)
        if of_rows is None:
            return cast(Tensor, whole if there is None else there)
        whole = cast(Tensor, whole)
        if end.post_norm is None:
            return self._ops.norm(whole, of_rows, out=there)
        return self._ops.norm(
            whole,
            of_rows,
            scale=end.scale,
            residual=_there(run, residual, part),
            sum_scale=end.sum_scale,
            out=there,
        )


def _there(run: ForwardPass, rows: Rows | None, part: slice) -> Tensor | None:
    if not isinstance(rows, str):
        return rows
    hidden = run.input
    return hidden if part in (ALL, slice(0, len(hidden))) else hidden[part]


def fetch(run: ForwardPass, tile: Tile) -> Generator[Unit, Weights, QTensor]:
    """Wait for a tile, with the hidden states put away meanwhile."""
    return cast(QTensor, (yield from wait_for(run, tile))[tile.name])


def wait_for(run: ForwardPass, unit: Unit) -> Generator[Unit, Weights, Weights]:
    """Wait for a part of a layer's weights, with the hidden states put away meanwhile."""
    if run.hidden is not None:
        run.activations.store(run.hidden)
    weights = yield unit
    if run.hidden is not None:
        run.hidden = run.activations.load()
    return weights


def vector(weights: Weights, name: str) -> Tensor | None:
    """A dense weight, None where this model has none of that name."""
    return cast("Tensor | None", weights.get(name))


def norm_of(spec: DecoderSpec, weights: Weights, module: str) -> Norm | None:
    """The norm of a module, None where this model has none of that name."""
    weight, bias = (vector(weights, f"{module}.{name}") for name in ("weight", "bias"))
    return None if weight is None else Norm(weight, spec.norm_eps, bias, spec.norm == "layer")


def tiled(weights: Weights) -> bool:
    """Whether any matrix comes in tiles."""
    return any(isinstance(weight, TiledMatrix) for weight in weights.values())
