"""Attention of a layer to its KV cache, between the projections of its input and its output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from qoff.kernels.layout.ending import Norm
from qoff.kernels.layout.heads import HeadShape
from qoff.kernels.ops import Ops
from qoff.memory import Weights
from qoff.models import names
from qoff.models.forward_pass import ForwardPass, columns
from qoff.models.spec import DecoderSpec

from .latent import Latent
from .linear import Linear, Steps, vector


class Attention:
    """From hidden states to what the output projection is given."""

    def __init__(
        self, spec: DecoderSpec, ops: Ops, shapes: Sequence[HeadShape], device: torch.device | None
    ) -> None:
        """shapes: of `spec.cached_layers`. device: of hidden states."""
        self._spec, self._ops = spec, ops
        cached = dict(zip(spec.cached_layers, shapes, strict=True))
        layers = filter(spec.attends, range(spec.num_layers))
        self._places = {layer: spec.cache_places[layer][-1] for layer in layers}
        self._shapes = {layer: cached[place] for layer, place in self._places.items()}
        for i in range(spec.num_layers - spec.shared_kv, spec.num_layers):
            self._shapes[i] = replace(self._shapes[i], appends=False)
        self._linear = Linear(ops)
        self._latent = None if spec.latent is None else Latent(spec, ops)
        unweighted = spec.qk_norm == "unweighted"
        self._ones = torch.ones(spec.head_dim, device=device) if unweighted else None

    def steps(
        self,
        layer: int,
        run: ForwardPass,
        weights: Weights,
        norm: Norm | None,
        keep: Sequence[int] | None,
    ) -> Steps:
        """Outputs of all heads, [M, o_columns]; the new tokens are then in the cache.

        keep: rows, ascending, with which alone the pass goes on; None: with all.
        """
        workspace = run.workspace
        assert workspace is not None
        shape, gated = self._shapes[layer], self._spec.gated_attention
        widths = [shape.qkv_width, self._spec.gates(layer)]  # of queries, keys and values; of gates
        memory = columns(workspace.attended, shape.out_width)
        gates: Tensor | None = None
        if self._latent is not None:
            qkv, gates = yield from self._latent.queries(layer, run, weights, norm)
        else:
            out = columns(workspace.qkv, sum(widths[: 1 + gated]))
            qkv = yield from self._projected(layer, run, weights, norm, out)
            if gated:
                qkv, gates = qkv.split(widths, 1)
        q_norm, k_norm = self._head_norms(layer, weights)

        def attend(part: ForwardPass, cache: Any, out: Tensor | None, qkv: Tensor) -> Tensor:
            return self._ops.attention(
                qkv,
                shape,
                cache,
                part.ragged,
                rotary=run.rotary[layer],
                q_norm=q_norm,
                k_norm=k_norm,
                sinks=vector(weights, "self_attn.sinks"),
                chosen=part.chosen,
                out=out,
            )

        attended = by_parts(run, self._places[layer], attend, memory, qkv)
        if gates is not None:
            activation = self._spec.gate_activation
            attended = self._ops.gate(attended, gates, activation=activation, out=memory)
        attended = run.kept(keep, attended)
        if self._spec.value_dim:  # where queries were
            sizes = shape.head_dim, self._spec.value_dim
            out = columns(workspace.qkv, shape.heads * sizes[1])
            out = None if out is None else out[: len(attended)]
            return self._ops.resize_heads(attended, *sizes, out=out)
        return attended if self._latent is None else self._latent.values(run, weights, attended)

    def _projected(
        self,
        layer: int,
        run: ForwardPass,
        weights: Weights,
        norm: Norm | None,
        out: Tensor | None,
    ) -> Steps:
        """Queries, keys, values and gates; values have as many channels as keys, with zeros."""
        values = self._spec.value_dim
        if not values:
            return (yield from self._linear(run, weights, names.QKV, out=out, norm=norm))
        shape = self._shapes[layer]
        first = (shape.heads + shape.kv_heads) * shape.head_dim
        own = None if out is None else out[:, : first + shape.kv_heads * values]
        qkv = yield from self._linear(run, weights, names.QKV, out=own, norm=norm)
        return self._ops.resize_heads(qkv, values, shape.head_dim, first=first, out=out)

    def _head_norms(self, layer: int, weights: Weights) -> tuple[Tensor | None, Tensor | None]:
        """Weights of the norms of queries and of keys."""
        if self._ones is not None and self._spec.rope_layers[layer]:
            return self._ones, self._ones
        q_norm, k_norm = (vector(weights, f"self_attn.{which}_norm.weight") for which in "qk")
        return q_norm, k_norm


def by_parts(
    run: ForwardPass,
    kv_layer: int,
    attend: Callable[..., Tensor],
    out: Tensor | None,
    *rows: Tensor,
) -> Tensor:
    """What `attend` finds, each part of a pass to its own cache, in `out` if there is one.

    attend: is called with the part, what the cache has of the layer, the part of `out` and those of
    `rows`.
    """
    outs = [out] if out is None else run.of_parts(out)
    for part, into, *mine in zip(run.parts, outs, *map(run.of_parts, rows), strict=True):
        assert part.cached is not None
        found = attend(part, part.cached.open(kv_layer), into, *mine)
        part.cached.close(kv_layer)
    return found if out is None or not run.joined else out
