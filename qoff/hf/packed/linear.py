"""The linear layer that transformers' models get: packed codes, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from qoff.errors import OpError
from qoff.kernels.dequantize import pieces, times_matrix
from qoff.kernels.layout.qtensor import QTensor
from qoff.kernels.operands import FLOATS
from qoff.kernels.ops import ops_for

from .module import PackedModule


def packed_linear(
    x: Tensor, matrix: QTensor | Callable[[], QTensor], bias: Tensor | None = None
) -> Tensor:
    """Return x @ W.T + bias in the dtype of x, differentiable in x and bias; W is frozen.

    matrix: W, or what returns it, which may lie elsewhere at the backward pass.

    x: [..., K] of any float dtype, under autocast cast to its dtype. packed: [N, K], in the packing
    of its device. bias: [N]. The forward pass is the device's `w4_linear` (on a GPU for float16 and
    bfloat16), the backward pass is `times_matrix`. Raises OpError.
    """
    packed = matrix() if callable(matrix) else matrix
    if x.shape[-1:] != (packed.shape[1],):
        raise OpError(f"x must be [..., {packed.shape[1]}], not {list(x.shape)}")
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        x = x.to(torch.get_autocast_dtype(kind))
    learns = torch.is_grad_enabled()
    apart = bias is not None and learns and bias.requires_grad
    rows = x.reshape(-1, packed.shape[1])
    fused = None if apart else bias
    if learns and x.requires_grad:
        y: Tensor = _PackedLinear.apply(rows, packed, fused, matrix)
    else:
        y = _forward(rows, packed, fused)
    if apart and bias is not None:
        y = y + bias.to(y.dtype)
    return y.view(*x.shape[:-1], packed.shape[0])


class _PackedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: QTensor, bias: Tensor | None, matrix: Any) -> Tensor:
        ctx.matrix = matrix
        return _forward(x, packed, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        packed = ctx.matrix() if callable(ctx.matrix) else ctx.matrix
        return times_matrix(grad, packed), None, None, None


def _forward(x: Tensor, packed: QTensor, bias: Tensor | None) -> Tensor:
    """x [M, K] to [M, N]."""
    if not len(x):
        return x.new_empty(0, packed.shape[0])
    on_cpu = x.device.type == "cpu"
    if not on_cpu and x.dtype not in FLOATS:  # no kernel takes this dtype
        y = torch.cat([x @ dense.T for _, dense in pieces(packed, x.dtype)], dim=1)
        return y if bias is None else y + bias.to(y.dtype)
    taken = x.float() if on_cpu else x
    dense_bias = None if bias is None else bias.detach().to(taken.dtype)
    y = ops_for(x.device).w4_linear(taken.detach().contiguous(), packed, bias=dense_bias)
    return y.to(x.dtype)


class QoffLinear(PackedModule, nn.Linear):
    """nn.Linear on packed codes. `weight` can be read, not written; its gradient is never made."""

    weight = PackedModule.weight

    def __init__(
        self,
        packed: QTensor | PackedModule,
        bias: nn.Parameter | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """packed: a matrix [N, K], or the module whose matrix this one is. dtype: of `weight`."""
        nn.Module.__init__(self)
        if isinstance(packed, PackedModule):
            self.tie(packed)
            self.out_features, self.in_features = packed.owner.packed_shape
        else:
            self.hold(packed, dtype)
            self.out_features, self.in_features = packed.shape
        self.register_parameter("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return `packed_linear` of x [..., in_features]."""
        return packed_linear(x, self.qtensor, self.bias)

    def extra_repr(self) -> str:
        packed = self.qtensor
        return f"{super().extra_repr()}, bits={packed.bits}, group_size={packed.group_size}"


class QoffConv1D(QoffLinear):
    """In place of transformers' `Conv1D`, the linear layer of GPT-2 with its weight as [K, N]."""


class QoffGroups(QoffLinear):
    """In place of a linear layer with a matrix for each of `groups` groups of inputs.

    replaced: that layer, without its weight; see `qoff.models.modules.structure.groups_of`.
    """

    replaced: nn.Linear

    def __init__(
        self, packed: QTensor, replaced: nn.Linear, groups: int, dtype: torch.dtype
    ) -> None:
        super().__init__(packed, cast("nn.Parameter | None", replaced.bias), dtype)
        self.groups = groups
        self.__dict__["replaced"] = replaced

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., groups, K]. Returns [..., groups, N / groups]."""
        rows = self.out_features // self.groups
        found = []
        for group in range(self.groups):
            part = slice(group * rows, (group + 1) * rows)
            bias = None if self.bias is None else self.bias[part]
            found.append(packed_linear(x[..., group, :], partial(self._rows, part), bias))
        return torch.stack(found, -2)

    def _rows(self, part: slice) -> QTensor:
        return self.qtensor.rows(part.start, part.stop)
