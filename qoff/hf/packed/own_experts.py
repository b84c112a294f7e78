"""Packed experts of families that qoff has no decoder for, which compute as their module does."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from qoff.models.modules.linear import each_expert, first_of
from qoff.models.modules.structure import is_experts

from .experts import ExpertsForm, QoffExperts
from .linear import packed_linear


class QoffOwnExperts(QoffExperts):
    """One expert after another, between whose matrices is what transformers' module has there.

    Matrices have the rows of transformers' parameters, in their order. Differentiable in all but
    these.
    """

    @property
    def first(self) -> str:
        return first_of(self.replaced)

    def packed_rows(self, name: str) -> Tensor:
        return torch.arange(self.dense_shape(name)[1])

    def forward(self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """hidden_states: [..., H]; topk_ids: int64 [M, T]; topk_weights: [M, T]. Same shape."""
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        chosen = topk_ids.unique().tolist()
        found = each_expert(self.replaced, x, topk_ids, topk_weights, chosen, self._times)
        return found.view(hidden_states.shape)

    def _times(self, name: str, x: Tensor, e: int) -> Tensor:
        bias = getattr(self, f"{name}_bias")[e] if self.form.has_bias else None
        # A layer that keeps its activations may have its weights elsewhere at its backward pass.
        return packed_linear(x, partial(self.matrices[name].qexperts.expert, e), bias)


def own_form(module: nn.Module) -> ExpertsForm | None:
    """That of experts of transformers' interface, without norms. None: a module is no such."""
    if not is_experts(module) or getattr(module, "has_post_expert_norm", False):
        return None
    own: Any = module
    return ExpertsForm(bool(own.has_bias), bool(own.is_transposed), True, "", QoffOwnExperts)
