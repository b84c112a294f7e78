"""What launchers ask about a GPU; where there is none (Triton's interpreter), an H200's answers."""

from __future__ import annotations

import torch


def processors(device: torch.device) -> int:
    """Streaming multiprocessors."""
    if device.type != "cuda":
        return 132
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


# Those that the configurations are compiled and checked for, and others with the same registers,
# shared memory and tensor cores.
_ALIKE = {86: 89, 87: 80, 88: 89, 103: 100, 121: 120}


def capability(device: torch.device) -> int:
    """Compute capability whose configurations fit: 90 for 9.0, 89 for 8.6."""
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    exact = major * 10 + minor
    return _ALIKE.get(exact, exact)
