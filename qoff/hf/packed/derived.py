"""Packed modules with the code of the family's own class: embeddings and routers."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from qoff.kernels.embedding import embedding
from qoff.kernels.layout.qtensor import QTensor

from .module import PackedModule


class QoffEmbedding(PackedModule, nn.Embedding):
    """nn.Embedding on packed codes, whose rows are dequantized as they are looked up."""

    weight = PackedModule.weight

    def forward(self, input: Tensor) -> Tensor:
        """Rows `input` (integers [...]) as [..., K]. Raises OpError for one that is not there."""
        rows = embedding(input.reshape(-1).long(), self.qtensor)
        return rows.to(self.dtype_of_weight).view(*input.shape, -1)


class QoffRouter(PackedModule):
    """A router of transformers with packed codes, whose own code multiplies by `weight`."""

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The dequantized matrix [N, K], kept while codes and dtype are the same."""
        packed, dtype = self.qtensor, self.dtype_of_weight
        kept = self.__dict__.get("_dense")
        if kept is None or kept[0] is not packed.codes or kept[1].dtype != dtype:
            dense: Any = packed.dequantize(dtype)
            dense._is_hf_initialized = True  # transformers' initializers leave it alone
            kept = self.__dict__["_dense"] = (packed.codes, dense)
        found: Tensor = kept[1]
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in super().__getstate__().items() if key != "_dense"}


@cache
def _packed_class(base: Any, kind: Any) -> Any:
    return type(f"Qoff{base.__name__}", (base, kind), {})


def packed_like(module: nn.Module, packed: QTensor, dtype: torch.dtype) -> PackedModule:
    """Return a module like an embedding or a router, of whatever class, with packed rows."""
    base: Any = type(module)
    own = QoffEmbedding if isinstance(module, nn.Embedding) else QoffRouter
    kind = own if base is nn.Embedding else _packed_class(base, own)
    made: PackedModule = _copied(module, kind, ("weight",))
    made.hold(packed, dtype)
    return made


def dense_like(module: QoffEmbedding | QoffRouter, weight: nn.Parameter) -> nn.Module:
    """Return a module of the class that a packed one was made from, with this weight."""
    bases = type(module).__mro__
    kind: Any = nn.Embedding if bases[0] is QoffEmbedding else bases[1]
    made: nn.Module = _copied(module, kind, ("codes", "scale_min", "dtype_like"))
    for kept in ("_packed", "_dense"):
        made.__dict__.pop(kept, None)
    made._parameters["weight"] = weight
    return made


def _copied(module: nn.Module, kind: Any, without: tuple[str, ...]) -> Any:
    """A module of another class with the same attributes, less some parameters and buffers."""
    made = kind.__new__(kind)
    made.__dict__.update(module.__dict__)
    made._parameters = {k: v for k, v in module._parameters.items() if k not in without}
    made._buffers = {k: v for k, v in module._buffers.items() if k not in without}
    made._non_persistent_buffers_set = set(module._non_persistent_buffers_set) - set(without)
    return made


def is_router(module: nn.Module) -> bool:
    """Whether a module is a router of transformers: a matrix, and how many experts it chooses."""
    weight = module._parameters.get("weight")
    return weight is not None and weight.dim() == 2 and hasattr(module, "top_k")
