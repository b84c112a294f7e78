"""Small tensors on their way from host memory to a device, without waiting for it."""

from __future__ import annotations

import torch
from torch import Tensor


def pinned(x: Tensor, device: torch.device) -> Tensor:
    """x in host memory that can be copied to a device without waiting.

    torch does not use that memory again before copies from it are done.
    """
    return x.pin_memory() if device.type == "cuda" and not x.is_cuda else x


def on_device(x: Tensor, device: torch.device) -> Tensor:
    """x on a device; itself where it is there already. In host memory it is there on return."""
    # Of a GPU's tensor, a copy that does not block is read before it has arrived.
    return pinned(x, device).to(device, non_blocking=device.type != "cpu")
