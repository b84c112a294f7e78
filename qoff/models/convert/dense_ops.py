"""The ops of a decoder in torch, on float matrices as well: differentiable, and open to look at."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from qoff.errors import UnsupportedModelError
from qoff.kernels.layout.heads import HeadShape
from qoff.kernels.layout.layer_cache import LayerCache
from qoff.kernels.layout.qexperts import ExpertsMlp
from qoff.kernels.layout.qtensor import QTensor
from qoff.kernels.layout.ragged import Ragged
from qoff.kernels.reference import ops as reference_ops

Seen = Callable[[object, Tensor, Tensor], None]  # a matrix, its input [M, K], its output [M, N]


class DenseOps:
    """`kernels.ops.Ops` for matrices that are QTensors or float tensors [N, K].

    seen: is told every product before a bias or an activation. Without gradients, attention is the
    CPU's own op.
    """

    PACKING, CACHE, USES_OUT = "split32", "host", False
    ACTIVATION_BITS: tuple[int, ...] = (16,)

    def __init__(self, seen: Seen | None = None) -> None:
        self.seen = seen

    def w4_linear(
        self,
        x: Tensor,
        weight: QTensor | Tensor,
        *,
        norm: Tensor | None = None,
        eps: float = 0.0,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        silu_mul: bool = False,
        out: Tensor | None = None,
    ) -> Tensor:
        """See `kernels.reference.ops.w4_linear`."""
        if norm is not None:
            x = reference_ops.rms_norm(x, norm, eps)
        matrix = weight.dequantize() if isinstance(weight, QTensor) else weight
        y = x @ matrix.T
        if self.seen is not None:
            self.seen(weight, x, y)
        if bias is not None:
            y = y + bias
        if silu_mul:
            y = reference_ops.activate(y, "silu")
        if residual is not None:
            y = y + residual
        return y if out is None else out.copy_(y)

    def attention(
        self,
        qkv: Tensor,
        shape: HeadShape,
        cache: LayerCache,
        ragged: Ragged,
        *,
        rotary: tuple[Tensor, Tensor] | None = None,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        sinks: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """See `kernels.reference.ops.attention`."""
        if torch.is_grad_enabled():
            op = reference_ops.attention
        else:
            from qoff.kernels.cpu import ops as cpu

            op = cpu.attention
        return op(
            qkv,
            shape,
            cache,
            ragged,
            rotary=rotary,
            q_norm=q_norm,
            k_norm=k_norm,
            sinks=sinks,
            out=out,
        )

    def experts(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, mlp: ExpertsMlp) -> Tensor:
        """Experts come quantized only. Raises UnsupportedModelError."""
        raise UnsupportedModelError(
            "a mixture of experts cannot be calibrated; convert it with hqq, mse or rtn"
        )
