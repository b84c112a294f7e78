"""The factor of the loss in a backward pass of float16, whose small gradients would else be 0."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from qoff.errors import TrainingError

_BEGIN, _INTERVAL = 2.0**16, 2000  # as torch.amp.GradScaler


def uses_float16(model: nn.Module) -> bool:
    """Whether some weights are float16, and so what is computed with them."""
    return any(p.dtype == torch.float16 for p in model.parameters())


@dataclass
class LossScale:
    """Halved when gradients overflow, doubled after 2,000 steps without that.

    value: now. good: steps without overflow, since it was changed.
    """

    value: float = _BEGIN
    good: int = 0

    def fits(self) -> None:
        """A step had finite gradients."""
        self.good += 1
        if self.good == _INTERVAL:
            self.value, self.good = 2 * self.value, 0

    def overflows(self) -> None:
        """A step had others, and is left out. Raises TrainingError where no scale is left."""
        if self.value <= 1:
            raise TrainingError(
                "gradients are not finite at a loss scale of 1; train in bfloat16 or float32"
            )
        self.value, self.good = self.value / 2, 0
