"""States of recurrent layers in panels: some columns of a head's matrix lie together."""

from __future__ import annotations

import torch
from torch import Tensor


def whole(memory: Tensor, fresh: bool = False) -> Tensor:
    """[heads, panels, rows, panel] as [heads, rows, columns]; fresh: zeros of that shape."""
    found = memory.transpose(1, 2).flatten(2)
    return torch.zeros_like(found) if fresh else found


def panels(memory: Tensor, panel: int) -> Tensor:
    """The way back; panel: columns that lie together."""
    return memory.unflatten(2, (-1, panel)).transpose(1, 2)
