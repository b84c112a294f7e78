"""Gradients of an embedding, row by row: torch makes one of all rows, mostly zeros."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from greenlet import getcurrent
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from .passes import TrainingPass


class EmbeddingRows:
    """Takes the place of the forward of a model's input embeddings, for passes that learn.

    sum_of: where a parameter's gradients are summed, float32.
    """

    def __init__(self, module: nn.Embedding, sum_of: Callable[[Tensor], Tensor]) -> None:
        self._module, self._forward, self._sum_of = module, module.forward, sum_of
        self._anchor = torch.zeros((), requires_grad=True)  # has autograd call `backward`
        module.forward = self  # type: ignore[assignment]

    def __call__(self, ids: Tensor) -> Tensor:
        here = getcurrent()
        if not (isinstance(here, TrainingPass) and torch.is_grad_enabled()):
            return self.rows(ids)
        found: Tensor = _Rows.apply(self._anchor, ids, self)
        return found

    def rows(self, ids: Tensor) -> Tensor:
        """Their values."""
        return self._forward(ids)

    def add(self, ids: Tensor, grad: Tensor) -> None:
        """Sum the gradients of rows [..., K]; that of padding stays zero."""
        flat = ids.reshape(-1)
        given = grad.reshape(len(flat), -1).float()
        padding = self._module.padding_idx
        if padding is not None:
            given = given.masked_fill((flat == padding)[:, None], 0)
        self.add_flat(flat, given)

    def add_flat(self, flat: Tensor, given: Tensor) -> None:
        """Sum gradients [n, K], float32, of the rows of ids [n]."""
        add_rows(self._sum_of(self._module.weight), flat, given)


def add_rows(total: Tensor, at: Tensor, given: Tensor) -> None:
    """Add rows [n, K] to those of `total` at [n], of which some may be the same."""
    if total.is_cuda:  # where `index_add_` sums in any order
        total.index_put_((at,), given, accumulate=True)
    else:
        total.index_add_(0, at, given)


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, ids: Tensor, embedding: EmbeddingRows) -> Tensor:
        ctx.ids, ctx.embedding = ids, embedding
        return embedding.rows(ids)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        ctx.embedding.add(ctx.ids, grad)
        return None, None, None


def by_rows(model: Any, sum_of: Callable[[Tensor], Tensor]) -> bool:
    """Sum gradients of a model's input embeddings by rows, where they are torch's and learn."""
    find: Any = getattr(model, "get_input_embeddings", lambda: None)
    module: Any = find()
    plain = type(module) is nn.Embedding and module.max_norm is None
    if not plain or module.scale_grad_by_freq or module.sparse:
        return False
    if not module.weight.requires_grad or "forward" in module.__dict__:
        return False
    EmbeddingRows(module, sum_of)
    return True
