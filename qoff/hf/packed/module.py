"""What packed linears and embeddings share: buffers of codes and scales instead of a weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from qoff.kernels.layout.qexperts import QExperts
from qoff.kernels.layout.qtensor import QTensor
from qoff.kernels.layout.widening import read_bits

from .weight import PackedWeight


def packing_for(device: torch.device) -> str:
    """The packing that kernels of a device read."""
    return "rows16" if device.type == "cpu" else "split32"


def qtensor_of(codes: Tensor, scale_min: Tensor, shape: tuple[int, int]) -> QTensor:
    """Return the QTensor [N, K] that two tensors are; their shapes tell packing, bits and group.

    Raises OpError for tensors that are not those of one matrix of this shape.
    """
    half = codes.dim() == 2
    k, columns = shape[1], max(1, codes.shape[1])
    bits = 8 * columns // k if half else 32 // max(1, k // columns)
    groups = scale_min.shape[0] if half else scale_min.shape[1] if scale_min.dim() > 1 else 1
    packing = "split32" if half else "rows16"
    return QTensor(codes, scale_min, shape, bits, k // max(1, groups), packing)


class CodesModule(nn.Module):
    """A module with the buffers `codes` and `scale_min`; `to(dtype)` casts neither.

    What they make up is kept in `_packed` for as long as they are the same. On a device whose
    kernels read another packing or width, they are repacked once, when they are needed.
    """

    codes: Tensor
    scale_min: Tensor
    packed_shape: tuple[int, int]  # of a matrix

    def hold(self, packed: QTensor | QExperts, dtype: torch.dtype) -> None:
        """Take codes. dtype: of the weight that they stand for; it follows `to(dtype)`."""
        self.packed_shape = packed.shape
        self.register_buffer("codes", packed.codes)
        self.register_buffer("scale_min", packed.scale_min)
        like = torch.empty(0, dtype=dtype, device=packed.device)
        self.register_buffer("dtype_like", like, persistent=False)
        self.__dict__["_packed"] = packed

    def _held(self, made: Callable[..., Any], repacked: Callable[[Any], Any]) -> Any:
        """What the codes make up: as they are, and as the device's kernels read them."""
        codes, scale_min = self.codes, self.scale_min
        packed = self.__dict__.get("_packed")
        if packed is None or packed.codes is not codes or packed.scale_min is not scale_min:
            packed = made(codes, scale_min, self.packed_shape)
        packing = packing_for(packed.device)
        if packed.packing != packing or packed.bits != read_bits(packed.bits, packing):
            packed = repacked(packed)
            self.codes, self.scale_min = packed.codes, packed.scale_min
        self.__dict__["_packed"] = packed
        return packed

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        """As nn.Module does, but scales are moved only, never cast."""
        scales = self._buffers.get("scale_min")
        if scales is None:
            return super()._apply(fn, recurse)
        self._buffers["scale_min"] = scales.view(torch.uint8)
        try:
            return super()._apply(fn, recurse)
        finally:
            moved = self._buffers["scale_min"]
            assert moved is not None
            self._buffers["scale_min"] = moved.view(scales.dtype)

    def __getstate__(self) -> dict[str, Any]:
        """Without what kernels keep addresses with; it is made anew."""
        return {key: value for key, value in self.__dict__.items() if key != "_packed"}


class PackedModule(CodesModule):
    """A module whose codes are a matrix, or which is tied to another that has it."""

    def tie(self, owner: PackedModule) -> None:
        """Use the matrix of another module, now and whatever becomes of it."""
        self.__dict__["_owner"] = owner  # not a submodule: it has its place elsewhere

    @property
    def owner(self) -> PackedModule:
        """The module that holds the matrix: this one, unless it is tied."""
        owner: PackedModule = self.__dict__.get("_owner", self)
        return owner

    @property
    def qtensor(self) -> QTensor:
        """The matrix, in the packing of the device that it is on."""
        found: QTensor = self.owner._held(
            qtensor_of, lambda packed: packed.for_kernels(packing_for(packed.device))
        )
        return found

    @property
    def weight(self) -> PackedWeight:
        """Shape, dtype and device of the matrix; its values where an op reads it."""
        return PackedWeight(self.qtensor, self.dtype_of_weight, self.__dict__.get("_computes_on"))

    def computes_on(self, device: torch.device) -> None:
        """Where `weight` says it is, for a module whose codes are there only while it runs."""
        self.__dict__["_computes_on"] = device

    @property
    def dtype_of_weight(self) -> torch.dtype:
        """The dtype of `weight`, and of what an embedding returns."""
        like: Tensor = self.owner._buffers["dtype_like"]  # type: ignore[assignment]
        return like.dtype

    def dequantize(self) -> Tensor:
        """Return the whole matrix [N, K] in the dtype of `weight`."""
        return self.qtensor.dequantize(self.dtype_of_weight)
