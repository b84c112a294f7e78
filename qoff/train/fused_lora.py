"""LoRA beside packed matrices as one product: nothing is scaled or added in a pass of its own."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from qoff.hf.packed.linear import QoffLinear
from qoff.kernels.dequantize import times_matrix
from qoff.kernels.layout.qtensor import QTensor
from qoff.kernels.ops import ops_for


class _Adapter(NamedTuple):
    """y += scale * x @ a.T @ b.T; a: float32 [r, K], b: float32 [N, r]."""

    a: Tensor
    b: Tensor
    scale: float


class FusedLora:
    """Takes the place of the `forward` of PEFT's linear layer, and is as that computes.

    It is called where there is more to do than the product: several adapters, dropout, DoRA,
    biases that learn, other dtypes than float32, a GPU.
    """

    def __init__(self, layer: Any) -> None:
        self.own, self._layer = layer.forward, layer
        layer.forward = self

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        adapter = None if args or kwargs else self._adapter(x)
        if adapter is None:
            found: Tensor = self.own(x, *args, **kwargs)
            return found
        base: QoffLinear = self._layer.base_layer
        rows = x.reshape(-1, x.shape[-1])
        y: Tensor = _Fused.apply(rows, *adapter, base.qtensor, base.bias)
        return y.view(*x.shape[:-1], -1)

    def _adapter(self, x: Tensor) -> _Adapter | None:
        """The one that is active, if it is as plain as that."""
        layer, names = self._layer, self._layer.active_adapters
        if layer.disable_adapters or layer.merged or len(names) != 1 or not x.numel():
            return None
        (name,) = names
        if name not in layer.lora_A or name in layer.lora_variant:
            return None
        bias, dropout = layer.base_layer.bias, layer.lora_dropout[name]
        a, b = layer.lora_A[name], layer.lora_B[name]
        learns = a.bias is not None or b.bias is not None
        learns = learns or (bias is not None and bias.requires_grad)
        drops = layer.training and not isinstance(dropout, nn.Identity)
        wide = all(t.dtype == torch.float32 for t in (x, a.weight, b.weight))
        if learns or drops or not (wide and x.is_cpu) or torch.is_autocast_enabled("cpu"):
            return None
        return _Adapter(a.weight, b.weight, layer.scaling[name])


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        a: Tensor,
        b: Tensor,
        scale: float,
        packed: QTensor,
        bias: Tensor | None,
    ) -> Tensor:
        low = x @ a.t()
        ctx.save_for_backward(x, low, a, b)
        ctx.packed, ctx.scale = packed, scale
        y = low @ (b * scale).t()
        dense = None if bias is None else bias.float()
        ops_for(x.device).w4_linear(x.contiguous(), packed, bias=dense, residual=y, out=y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, low, a, b = ctx.saved_tensors
        of_low = grad @ (b * ctx.scale)
        of_b = (grad.t() @ low).mul_(ctx.scale) if ctx.needs_input_grad[2] else None
        of_a = of_low.t() @ x if ctx.needs_input_grad[1] else None
        of_x = None
        if ctx.needs_input_grad[0]:
            of_x = times_matrix(grad, ctx.packed).addmm_(of_low, a)
        return of_x, of_a, of_b, None, None, None


def fuse(model: nn.Module) -> int:
    """Fuse the LoRA layers beside packed matrices, for the CPU; returns how many."""
    try:
        from peft.tuners.lora.layer import Linear
    except ModuleNotFoundError:
        return 0
    found = [
        layer
        for layer in model.modules()
        if type(layer) is Linear
        and type(layer.base_layer) is QoffLinear
        and not isinstance(layer.__dict__.get("forward"), FusedLora)
    ]
    for layer in found:
        FusedLora(layer)
    return len(found)
