"""A mixture of experts: which of them compute for a token, and where their weights are."""

from __future__ import annotations

from typing import cast

from torch import Tensor

from qoff.kernels.layout.qexperts import ExpertsMlp, QExperts
from qoff.kernels.layout.qtensor import QTensor
from qoff.kernels.ops import Ops
from qoff.memory import Weights
from qoff.models.spec_parts import ExpertsSpec

from .linear import vector

_MATRICES = ("gate_up_proj", "down_proj")


class Experts:
    """Computes the experts of a layer."""

    def __init__(self, spec: ExpertsSpec, ops: Ops) -> None:
        self.spec, self._ops = spec, ops
        self._views: dict[tuple[int, int], tuple[QExperts, QExperts]] = {}  # by where they lie

    def compute(self, x: Tensor, scores: Tensor, weights: Weights) -> Tensor:
        """The weighted sum of the outputs of each token's experts, [M, hidden_size].

        scores: the router's, [M, experts].
        """
        topk_ids, topk_weights = self.route(scores)
        mlp = self.needed(weights, topk_ids)
        return self._ops.experts(x, topk_ids, topk_weights, mlp)

    def route(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Experts of each token, int64 [M, top_k], and their weights, float32 [M, top_k]."""
        scores = scores.float()
        if self.spec.softmax == "all":
            scores = scores.softmax(-1)
        topk_weights, topk_ids = scores.topk(self.spec.top_k, dim=-1)
        if self.spec.softmax == "topk":
            topk_weights = topk_weights.softmax(-1)
        if self.spec.normalized:
            topk_weights = topk_weights / topk_weights.sum(-1, keepdim=True)
        return topk_ids, topk_weights

    def needed(self, weights: Weights, topk_ids: Tensor) -> ExpertsMlp:
        """The weights of a layer's chosen experts, of those that it was handed: all of them."""
        del topk_ids
        first = cast(QTensor, weights["mlp.experts.0.gate_up_proj"])
        last = cast(QTensor, weights[f"mlp.experts.{self.spec.count - 1}.down_proj"])
        # Layers that stream come to the same places again and again.
        key = (first.codes.data_ptr(), last.codes.data_ptr())
        if key not in self._views:
            self._views[key] = self._view(weights)
        biases = (vector(weights, f"mlp.experts.{name}.bias") for name in _MATRICES)
        rows = (None if bias is None else bias.view(self.spec.count, -1) for bias in biases)
        return ExpertsMlp(*self._views[key], self.spec.activation, *rows)

    def _view(self, weights: Weights) -> tuple[QExperts, QExperts]:
        gate_up, down = (
            QExperts.of(
                [cast(QTensor, weights[f"mlp.experts.{e}.{name}"]) for e in range(self.spec.count)]
            )
            for name in _MATRICES
        )
        return gate_up, down
