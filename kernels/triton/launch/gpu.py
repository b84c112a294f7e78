"""What launchers ask about a GPU."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

# Those that the configurations are compiled and checked for, and others with the same registers,
# shared memory and tensor cores.
_ALIKE = {86: 89, 87: 80, 88: 89, 103: 100, 121: 120}


class Gpu(NamedTuple):
    """What the choice of a configuration depends on."""

    capability: int  # compute capability whose configurations fit: 90 for 9.0, 89 for 8.6
    processors: int  # streaming multiprocessors

    @staticmethod
    @cache
    def of(device: torch.device) -> Gpu:
        """The GPU `device`; for Triton's interpreter on a CPU, a small one."""
        if device.type != "cuda":
            return Gpu(90, 4)
        found = torch.cuda.get_device_properties(device)
        exact = 10 * found.major + found.minor
        return Gpu(_ALIKE.get(exact, exact), found.multi_processor_count)
