"""The router that transformers' models get: a small matrix of packed codes, used as floats."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from qoff.kernels.layout.qtensor import QTensor

from .module import PackedModule


class QoffRouter(PackedModule):
    """A module with packed codes whose own code multiplies by `weight`; see `packed_router`."""

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
def _packed_class(base: Any) -> Any:
    return type(f"Qoff{base.__name__}", (base, QoffRouter), {})


def is_router(module: nn.Module) -> bool:
    """Whether a module is a router of transformers: a matrix, and how many experts it chooses."""
    weight = module._parameters.get("weight")
    return weight is not None and weight.dim() == 2 and hasattr(module, "top_k")


def packed_router(module: nn.Module, packed: QTensor, dtype: torch.dtype) -> nn.Module:
    """Return a module like a router of transformers, with its code, but a packed weight."""
    base: Any = type(module)
    kind = _packed_class(base)
    made: Any = kind.__new__(kind)
    made.__dict__.update(module.__dict__)
    made._parameters = {k: v for k, v in module._parameters.items() if k != "weight"}
    made._buffers = dict(module._buffers)
    made._non_persistent_buffers_set = set(module._non_persistent_buffers_set)
    made.hold(packed, dtype)
    result: nn.Module = made
    return result
