"""What launchers ask about a GPU; where there is none (Triton's interpreter), an H200's answers."""

from __future__ import annotations

import torch


def processors(device: torch.device) -> int:
    """Streaming multiprocessors."""
    if device.type != "cuda":
        return 132
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def capability(device: torch.device) -> int:
    """Compute capability: 90 for 9.0."""
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor
