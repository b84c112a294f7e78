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
        self._views: dict[tuple[int, ...], list[QExperts]] = {}  # by where they lie

    def compute(self, x: Tensor, scores: Tensor, weights: Weights, hidden: Tensor) -> None:
        """hidden += the weighted sum of the outputs of each token's experts, [M, hidden_size].

        x: their inputs. scores: the router's, [M, experts].
        """
        spec = self.spec
        gate_up, down = self._matrices(weights)
        biases = (vector(weights, f"mlp.experts.{name}.bias") for name in _MATRICES)
        rows = (None if bias is None else bias.view(self.spec.count, -1) for bias in biases)
        mlp = ExpertsMlp(gate_up, down, self.spec.activation, *rows)
        chosen = self._ops.route(scores, spec.top_k, spec.softmax, spec.normalized)
        self._ops.experts(x, *chosen, mlp, residual=hidden, out=hidden)

    def _matrices(self, weights: Weights) -> list[QExperts]:
        """Those of gate and up and those down, of all experts of a layer."""
        last = self.spec.count - 1
        ends = (weights["mlp.experts.0.gate_up_proj"], weights[f"mlp.experts.{last}.down_proj"])
        # Layers that stream come to the same places again and again.
        key = tuple(cast(QTensor, end).codes.data_ptr() for end in ends)
        if key not in self._views:
            self._views[key] = [
                QExperts.of(
                    [cast(QTensor, weights[f"mlp.experts.{e}.{name}"]) for e in range(last + 1)]
                )
                for name in _MATRICES
            ]
        return self._views[key]
