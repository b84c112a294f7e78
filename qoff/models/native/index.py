"""Which tokens a layer attends to, where an index of keys chooses them: `kernels.layout.index`."""

from __future__ import annotations

import torch
from torch import Tensor

from qoff.kernels.layout.ending import Norm
from qoff.kernels.ops import Ops, exact
from qoff.memory import Weights
from qoff.models import names
from qoff.models.forward_pass import ForwardPass
from qoff.models.spec_parts import IndexSpec

from .linear import Linear, Steps, vector


class Index:
    """From hidden states and compressed queries to the tokens that are attended to."""

    def __init__(self, spec: IndexSpec, ops: Ops) -> None:
        self._spec, self._shape, self._ops = spec, spec.shape, ops
        self._linear, self._exact_linear = Linear(ops), Linear(exact(ops))

    def steps(
        self,
        layer: int,
        place: int,
        run: ForwardPass,
        weights: Weights,
        norm: Norm | None,
        queries: tuple[Tensor, Norm],
        memory: Tensor | None,
    ) -> Steps:
        """Choose tokens for the layers from this one on; returns the rows that it chose by.

        place: of the index in caches. norm: of the hidden states. queries: compressed ones, and
        their norm. memory: [M, spec.columns], or None.
        """
        spec, width, dim = self._spec, self._shape.width, self._spec.dim
        key = slice(width - dim, width)
        parts = (slice(width - dim), slice(width, None), key)
        q_out, raw_out, key_out = (None if memory is None else memory[:, part] for part in parts)
        x, by = queries
        q = yield from self._linear(run, weights, names.INDEX_Q, x, out=q_out, norm=by)
        raw = yield from self._exact_linear(run, weights, names.INDEX_KEYS, out=raw_out, norm=norm)
        weight = vector(weights, f"{names.INDEX_NORM}.weight")
        bias = vector(weights, f"{names.INDEX_NORM}.bias")
        assert weight is not None
        by = Norm(weight, spec.norm_eps, bias, centered=True)
        keys = self._ops.norm(raw[:, :dim], by, out=key_out)
        qk = torch.cat((q, keys), 1) if memory is None else memory[:, :width]
        self._choose(layer, place, run, qk, raw[:, dim:])
        return qk

    def _choose(
        self, layer: int, place: int, run: ForwardPass, qk: Tensor, weights: Tensor
    ) -> None:
        rows = zip(run.parts, run.of_parts(qk), run.of_parts(weights), strict=True)
        for part, of_part, shares in rows:
            assert part.cached is not None
            part.chosen = self._ops.choose(
                of_part,
                shares,
                self._shape,
                part.cached.open(place),
                part.ragged,
                rotary=run.rotary[layer],
                out=part.chosen,
            )
            part.cached.close(place)
