"""One decoder layer on the ops: attention, then an MLP or experts, each added to the input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

from qoff.kernels.embedding import embedding
from qoff.kernels.layout.heads import HeadShape
from qoff.kernels.layout.qtensor import QTensor
from qoff.kernels.ops import Ops, exact
from qoff.memory import TiledMatrix, Weights
from qoff.models import names
from qoff.models.forward_pass import ForwardPass, first_rows, mlp_tokens
from qoff.models.spec import DecoderSpec

from .experts import Experts
from .linear import ALL, Linear, Steps, fetch, tiled, vector
from .unfused import activate, gate, normalized, rms_normalized

_BEFORE_ATTENTION, _BEFORE_MLP = "input_layernorm", "post_attention_layernorm"


class Layer:
    """Computes a layer of a forward pass, in place of its hidden states."""

    def __init__(self, spec: DecoderSpec, ops: Ops, shapes: Sequence[HeadShape]) -> None:
        self._spec, self._ops, self._shapes = spec, ops, shapes
        self._on_gpu = ops.CACHE == "device"
        self._linear = Linear(ops, spec.norm_eps)
        self._exact_linear = Linear(exact(ops), spec.norm_eps)  # for scores that decide
        self._experts = None if spec.experts is None else Experts(spec.experts, ops)

    def steps(self, layer: int, weights: Weights, run: ForwardPass) -> Steps:
        """Compute a layer; yields the tiles it waits for. Returns the hidden states."""
        if names.POSITIONS in weights:
            yield from self._add_positions(weights, run)
        attended = yield from self._attention(layer, weights, run)
        if self._spec.has_experts(layer):
            yield from self._mixture(weights, run)
        else:
            yield from self._mlp(weights, run)
        if self._spec.parallel:
            run.input.add_(attended)
        return run.input

    def _add_positions(self, weights: Weights, run: ForwardPass) -> Steps:
        """hidden += the learned embedding of each token's position."""
        assert run.positions is not None
        rows = run.positions.long() + self._spec.position_offset
        table = weights[names.POSITIONS]
        if isinstance(table, TiledMatrix):
            for tile in table.tiles:
                some = yield from fetch(run, tile)
                here = (rows >= tile.first_row) & (rows < tile.stop)
                run.input[here] += _gathered(some, rows[here] - tile.first_row, run.input)
        else:
            run.input.add_(_gathered(cast(QTensor, table), rows, run.input))
        return run.input

    def _attention(self, layer: int, weights: Weights, run: ForwardPass) -> Steps:
        """hidden += attention(norm(hidden)); of a parallel one, return what is to be added."""
        spec, cached, workspace = self._spec, run.cached, run.workspace
        assert cached is not None
        assert workspace is not None
        x, norm = self._input(weights, run, _BEFORE_ATTENTION)
        qkv = yield from self._linear(run, weights, names.QKV, x, out=workspace.qkv, norm=norm)
        q_norm, k_norm = (vector(weights, f"self_attn.{which}_norm.weight") for which in "qk")
        if spec.qk_norm == "all":
            queries, keys, _ = qkv.split([spec.q_rows, spec.kv_rows, spec.kv_rows], dim=1)
            for rows, by in ((queries, q_norm), (keys, k_norm)):
                rows.copy_(rms_normalized(rows, cast(Tensor, by), spec.norm_eps))
            q_norm = k_norm = None
        attended = self._ops.attention(
            qkv,
            self._shapes[layer],
            cached.open(layer),
            run.ragged,
            rotary=run.rotary[layer],
            q_norm=q_norm,
            k_norm=k_norm,
            sinks=vector(weights, "self_attn.sinks"),
            out=workspace.attended,
        )
        cached.close(layer)
        return (yield from self._output(run, weights, "self_attn.o_proj", attended))

    def _mlp(self, weights: Weights, run: ForwardPass) -> Steps:
        """hidden += down(act(gate(norm(hidden))) * up(norm(hidden)))."""
        count = len(run.input)
        step = max(1, mlp_tokens(count, tiled(weights), self._on_gpu))
        for first in range(0, count, step):
            part = slice(first, min(first + step, count))
            x, norm = self._input(weights, run, _BEFORE_MLP, part)
            inner = yield from self._inner(weights, run, "mlp", x, norm, part)
            yield from self._output(run, weights, "mlp.down_proj", inner, part)
        return run.input

    def _inner(
        self,
        weights: Weights,
        run: ForwardPass,
        module: str,
        x: Tensor | None,
        norm: Tensor | None,
        part: slice,
    ) -> Steps:
        """What goes into the down projection of an MLP."""
        act = self._spec.activation
        if not self._spec.gated:
            up = yield from self._linear(run, weights, f"{module}.up_proj", x, part=part, norm=norm)
            return activate(act, up)
        name, fused = f"{module}.gate_up_proj", act == "silu"
        out = None
        if fused and module == "mlp":
            assert run.workspace is not None
            out = first_rows(run.workspace.gated, part.stop - part.start)
        found = yield from self._linear(
            run, weights, name, x, out=out, part=part, norm=norm, silu_mul=fused
        )
        return found if fused else gate(act, found)

    def _mixture(self, weights: Weights, run: ForwardPass) -> Steps:
        """hidden += the chosen experts' outputs, and the shared one's."""
        experts = self._experts
        assert experts is not None
        count = len(run.input)
        step = max(1, mlp_tokens(count, False, self._on_gpu))
        for first in range(0, count, step):
            part = slice(first, min(first + step, count))
            x = normalized(self._spec, run.input[part], weights, _BEFORE_MLP)
            scores = yield from self._exact_linear(run, weights, names.ROUTER, x)
            added = experts.compute(x, scores, weights)
            if experts.spec.shared_size:
                shared = yield from self._inner(weights, run, "mlp.shared_expert", x, None, part)
                shared = yield from self._linear(
                    run, weights, "mlp.shared_expert.down_proj", shared
                )
                if experts.spec.shared_gate:
                    score = yield from self._exact_linear(run, weights, names.SHARED_GATE, x)
                    shared = shared * torch.sigmoid(score)
                added = added + shared
            run.input[part] += added
        return run.input

    def _input(
        self, weights: Weights, run: ForwardPass, module: str, part: slice = ALL
    ) -> tuple[Tensor | None, Tensor | None]:
        """Normalized hidden states, None for as they are; and the norm to fuse with a matmul."""
        if not self._spec.pre_norm:
            return None, None
        if self._spec.norm == "rms":
            return None, vector(weights, f"{module}.weight")
        return normalized(self._spec, run.input[part], weights, module), None

    def _output(
        self, run: ForwardPass, weights: Weights, name: str, x: Tensor, part: slice = ALL
    ) -> Steps:
        """Add a projection of x to the hidden states; of a parallel attention, return it."""
        spec, module = self._spec, name.rpartition(".")[0]
        aside = spec.parallel and module == "self_attn"
        later = spec.post_norm or spec.norm_after_add or spec.residual_scale != 1
        if not (aside or later):
            return (yield from self._linear(run, weights, name, x, part=part, adds=True))
        y = yield from self._linear(run, weights, name, x)
        if spec.post_norm:
            y = normalized(spec, y, weights, f"{module}.post_norm")
        if spec.residual_scale != 1:
            y = y * spec.residual_scale
        if aside:
            return y
        hidden = run.input[part]
        hidden += y
        if spec.norm_after_add:
            norm = _BEFORE_ATTENTION if module == "self_attn" else _BEFORE_MLP
            hidden.copy_(normalized(spec, hidden, weights, norm))
        return hidden


def _gathered(table: QTensor, rows: Tensor, like: Tensor) -> Tensor:
    """Rows of a matrix on the device, in the dtype of `like`."""
    return embedding(rows, table).to(like.dtype)


def layer_bytes(
    spec: DecoderSpec,
    tokens: int,
    dtype: torch.dtype,
    *,
    linear_bytes: Callable[[int, int, int], int],
    experts_bytes: Callable[[int, int, int, int, int], int],
    attention_bytes: int,
    tiled: bool = False,
) -> int:
    """The most bytes that a layer of `tokens` tokens allocates, on ops that allocate their results.

    As if attention, and then the MLP or the experts, freed nothing before their end. linear_bytes:
    of a matmul, by tokens, rows and columns of its matrix. experts_bytes: of the experts' op, by
    tokens, top_k, number and inner size of experts, and hidden size. attention_bytes: of its op.
    tiled: where matrices may come in tiles.
    """
    hidden, item = spec.hidden_size, dtype.itemsize
    part = mlp_tokens(tokens, tiled, on_gpu=True)
    normed = tokens * hidden * (2 * item + 8)  # in float32 and back
    aside = tokens * hidden * item  # added later: scaled, or what a parallel attention returns

    def linear(count: int, rows: int, columns: int) -> int:
        # The whole result beside that of a tile, and what a tile is added to.
        return linear_bytes(count, rows, columns) + 2 * count * rows * item * tiled

    attention = linear(tokens, spec.q_rows + 2 * spec.kv_rows, hidden) + attention_bytes
    attention += linear(tokens, hidden, spec.q_rows) + normed + aside
    if spec.qk_norm == "all":
        attention += tokens * spec.q_rows * (item + 8)
    attention += tokens * hidden * (4 + item) * (spec.learned_positions > 0)

    def mlp(inner: int) -> int:
        first = linear(part, 2 * inner if spec.gated else inner, hidden)
        activated = 3 * part * inner * item
        return first + activated + linear(part, hidden, inner)

    rest = mlp(spec.intermediate_size)
    if spec.experts is not None:
        experts = spec.experts
        some = mlp_tokens(tokens, False, on_gpu=True)
        routed = some * (experts.count * (item + 12) + experts.top_k * 24)
        routed += linear(some, experts.count, hidden)
        sizes = (experts.top_k, experts.count, experts.intermediate_size, hidden)
        shared = mlp(experts.shared_size) + 3 * aside if experts.shared_size else 0
        rest = max(rest, routed + experts_bytes(some, *sizes) + shared)
    return max(attention, rest + normed + 2 * aside)
