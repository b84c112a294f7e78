"""What multi-head latent attention does beside attention: see `kernels.layout.latent`."""

from __future__ import annotations

from collections.abc import Generator
from typing import cast

from torch import Tensor

from qoff.kernels.layout.ending import Norm
from qoff.kernels.layout.qtensor import QTensor
from qoff.kernels.ops import Ops
from qoff.memory import Unit, Weights
from qoff.models import names
from qoff.models.forward_pass import ForwardPass, LayerWorkspace, columns
from qoff.models.spec import DecoderSpec

from .index import Index
from .linear import Linear, vector


class Latent:
    """From hidden states to what attention is given, and from what it returns to values."""

    def __init__(self, spec: DecoderSpec, ops: Ops) -> None:
        assert spec.latent is not None
        self._spec, self._latent, self._ops = spec, spec.latent, ops
        self._shape = spec.latent.shape(spec.num_heads)
        self._linear = Linear(ops)
        self._index = None if spec.index is None else Index(spec.index, ops)

    def queries(
        self, layer: int, run: ForwardPass, weights: Weights, norm: Norm | None
    ) -> Generator[Unit, Weights, tuple[Tensor, Tensor | None]]:
        """Queries that attend to latents with the tokens' keys, [M, attention_width]; and gates.

        Where the layer has an index, that has then chosen tokens.
        """
        spec, workspace = self._spec, run.workspace
        assert workspace is not None
        first = self._columns(workspace, 0, spec.qkv_rows)
        first = yield from self._linear(run, weights, names.QKV, out=first, norm=norm)
        gates, dim = spec.gates(layer), self._shape.head_dim
        q, kv, by_head = first.split([spec.qkv_rows - dim - gates, dim, gates], 1)
        if self._latent.query_latent:
            out = self._columns(workspace, spec.qkv_rows, spec.q_rows)
            by = self._norm(weights, names.Q_NORM)
            q = q if self._ops.USES_OUT else q.contiguous()
            if self._index is not None and spec.index is not None and spec.index.layers[layer]:
                place, compressed = spec.cache_places[layer][0], (q, by)
                memory = self._columns(workspace, spec.qkv_rows, spec.index.columns)
                yield from self._index.steps(layer, place, run, weights, norm, compressed, memory)
            q = yield from self._linear(run, weights, names.Q_B, q, out=out, norm=by)
        by = self._norm(weights, names.KV_NORM)
        matrix = cast(QTensor, weights[names.KV_B])
        out = columns(workspace.qkv, (spec.num_heads + 1) * self._shape.head_dim)
        absorbed = self._ops.absorb(q, kv, matrix, by, self._shape, out=out)
        return absorbed, by_head if gates else None

    def values(self, run: ForwardPass, weights: Weights, attended: Tensor) -> Tensor:
        """Values of all heads, [M, o_columns], where `queries` had theirs."""
        assert run.workspace is not None
        out = self._columns(run.workspace, 0, self._spec.o_columns)
        matrix = cast(QTensor, weights[names.KV_B])
        return self._ops.expand(attended, matrix, self._shape, out=out)

    def _columns(self, workspace: LayerWorkspace, first: int, count: int) -> Tensor | None:
        memory = workspace.projected
        return None if memory is None else memory[:, first : first + count]

    def _norm(self, weights: Weights, module: str) -> Norm:
        weight = vector(weights, f"{module}.weight")
        assert weight is not None
        return Norm(weight, self._latent.norm_eps, None, False)
