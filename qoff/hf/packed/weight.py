"""The weight of a packed module as other libraries see it: an attribute that takes no memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from qoff.errors import QuantizationError
from qoff.kernels.layout.qtensor import QTensor


class PackedWeight(Tensor):
    """A matrix [N, K] with shape, dtype and device, whose values are dequantized when an op reads.

    Ops on it return plain tensors. Whatever would write to it raises QuantizationError.
    """

    _is_hf_initialized = True  # transformers' initializers leave it alone
    _packed: QTensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls, packed: QTensor, dtype: torch.dtype, device: torch.device | None = None
    ) -> PackedWeight:
        made: PackedWeight = Tensor._make_wrapper_subclass(
            cls, packed.shape, dtype=dtype, device=device or packed.device, requires_grad=False
        )
        made._packed = packed
        return made

    def __init__(
        self, packed: QTensor, dtype: torch.dtype, device: torch.device | None = None
    ) -> None:
        """packed: the codes. dtype: what the values are rounded to. device: None: the codes'."""

    @property
    def data(self) -> PackedWeight:
        return self

    @data.setter
    def data(self, value: Tensor) -> None:
        raise _read_only()

    def detach(self) -> PackedWeight:
        """Return itself: it has no gradient."""
        return self

    def __setitem__(self, index: Any, value: Any) -> None:
        raise _read_only()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        shape, bits = list(self.shape), self._packed.bits
        return f"PackedWeight({shape}, dtype={self.dtype}, device={self.device}, bits={bits})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0]._packed, args[0].dtype, args[0].device)
        if func._schema.is_mutable:
            raise _read_only()
        dense = tree_map_only(PackedWeight, _dense, (args, kwargs or {}))
        return func(*dense[0], **dense[1])


def _dense(weight: PackedWeight) -> Tensor:
    return weight._packed.dequantize(weight.dtype)


def _read_only() -> QuantizationError:
    return QuantizationError(
        "weight: it is packed and cannot be changed; keep an adapter beside it instead of merging, "
        "or call model.dequantize() first"
    )
