"""The ops as one interface, and which implementation serves which device."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from qoff.errors import OpError

from .layout.heads import HeadShape
from .layout.qexperts import QExperts
from .layout.qtensor import QTensor
from .layout.ragged import Ragged


class Ops(Protocol):
    """The ops a decoder is made of; `reference` says what each means."""

    PACKING: str  # of the weights these ops read
    CACHE: str  # what attention takes: "host", a `LayerCache`, or "device", a `DeviceLayerCache`
    USES_OUT: bool  # whether `out` spares anything; otherwise results are copied there

    def w4_linear(
        self,
        x: Tensor,
        weight: QTensor,
        *,
        norm: Tensor | None = None,
        eps: float = 0.0,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        silu_mul: bool = False,
        activation_bits: int = 16,
        out: Tensor | None = None,
    ) -> Tensor: ...

    def experts(
        self,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        gate_up: QExperts,
        down: QExperts,
        *,
        activation: str,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
        residual: Tensor | None = None,
        activation_bits: int = 16,
        out: Tensor | None = None,
    ) -> Tensor: ...

    def attention(
        self,
        qkv: Tensor,
        shape: HeadShape,
        cache: Any,  # see CACHE
        ragged: Ragged,
        *,
        rotary: tuple[Tensor, Tensor] | None = None,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        sinks: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor: ...


def ops_for(device: torch.device) -> Ops:
    """The fastest implementation for a device. Raises OpError where there is none."""
    if device.type == "cpu":
        from .cpu import ops as cpu

        cpu.default_pool()  # takes as many threads as torch has now; torch may be given fewer later
        return cpu
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise OpError("no GPU that torch can use; use device 'cpu', or a torch build for CUDA")
        try:
            from .triton import ops as triton_ops
        except ImportError as error:
            raise OpError(f"the ops for a GPU need Triton ({error}); install triton") from error
        return triton_ops
    raise OpError(f"no ops for device {device.type!r}; use 'cpu' or 'cuda'")
