"""The generators of random numbers that a model draws from: torch's, and the GPU's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeAlias

import torch
from torch import Tensor

State: TypeAlias = tuple[Tensor, ...]  # uint8, of the CPU and of the GPU


class Generators:
    """Of the device that a model computes on. Dropout is drawn there, all else on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self._gpus = [device] if device.type == "cuda" else []

    def state(self) -> State:
        """What `restore` goes back to."""
        return torch.get_rng_state(), *(torch.cuda.get_rng_state(x) for x in self._gpus)

    def restore(self, state: State) -> None:
        """Draw again what was drawn after `state`; of a GPU, if the state has one."""
        torch.set_rng_state(state[0])
        for device, found in zip(self._gpus, state[1:], strict=False):
            torch.cuda.set_rng_state(found, device)

    @contextmanager
    def forked(self) -> Iterator[None]:
        """What is drawn within is drawn again after it."""
        state = self.state()
        try:
            yield
        finally:
            self.restore(state)
