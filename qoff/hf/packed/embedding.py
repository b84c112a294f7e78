"""The embedding that transformers' models get: rows of packed codes, dequantized as looked up."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from qoff.kernels.embedding import embedding
from qoff.kernels.layout.qtensor import QTensor

from .module import PackedModule


class QoffEmbedding(PackedModule, nn.Embedding):
    """nn.Embedding on packed codes; made by `packed_embedding`."""

    weight = PackedModule.weight

    def forward(self, input: Tensor) -> Tensor:
        """Rows `input` (integers [...]) as [..., K]. Raises OpError for one that is not there."""
        rows = embedding(input.reshape(-1).long(), self.qtensor)
        return rows.to(self.dtype_of_weight).view(*input.shape, -1)


@cache
def _packed_class(base: Any) -> Any:
    """A class whose forward is that of `base`, but where that looks rows up they are packed."""
    if base is nn.Embedding:
        return QoffEmbedding
    return type(f"Qoff{base.__name__}", (base, QoffEmbedding), {})


def packed_embedding(module: nn.Embedding, packed: QTensor, dtype: torch.dtype) -> nn.Embedding:
    """Return a module like an nn.Embedding, or one of a class derived from it, with packed rows."""
    base: Any = type(module)
    kind = _packed_class(base)
    made: Any = kind.__new__(kind)
    made.__dict__.update(module.__dict__)
    made._parameters = {k: v for k, v in module._parameters.items() if k != "weight"}
    made._buffers = dict(module._buffers)
    made._non_persistent_buffers_set = set(module._non_persistent_buffers_set)
    made.hold(packed, dtype)
    result: nn.Embedding = made
    return result
