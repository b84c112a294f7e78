"""Experts of transformers' modules on packed matrices, one expert after another."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from qoff.memory import TiledMatrix

from .linear import Bound, Multiply


class QuantizedExperts:
    """The forward pass of an experts module while its matrices are bound.

    bound: by the name of the weight, the matrices of all experts in their order.
    """

    def __init__(self, module: nn.Module, multiply: Multiply) -> None:
        self.module: Any = module
        self._multiply = multiply
        self._first = "gate_up_proj" if module.has_gate else "up_proj"
        self.bound: dict[str, list[Bound]] = {}

    def __call__(self, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """hidden: float32 [T, H]; topk_ids: int64 [T, k]; topk_weights: [T, k]. Returns [T, H].

        Tiles come whatever was chosen: which units a pass asks for does not depend on its tokens.
        """
        module, out = self.module, torch.zeros_like(hidden)
        for e, matrix in enumerate(self.bound[self._first]):
            token, place = torch.where(topk_ids == e)
            if not len(token) and not isinstance(matrix, TiledMatrix):
                continue
            inner = self._multiply(hidden[token], matrix, self._bias(self._first, e))
            inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
            found = self._multiply(inner, self.bound["down_proj"][e], self._bias("down_proj", e))
            if module.has_post_expert_norm:
                found = module.post_expert_norm(found)
            out.index_add_(0, token, found * topk_weights[token, place, None].to(found.dtype))
        return out

    def _bias(self, name: str, expert: int) -> Tensor | None:
        if not self.module.has_bias:
            return None
        bias: Tensor = getattr(self.module, f"{name}_bias")
        return bias[expert].contiguous()
