"""`qoff env`: what qoff finds on the machine."""

from __future__ import annotations

import os
import platform
import shutil
from pathlib import Path
from typing import Any

import psutil
import torch

from qoff.kernels.processor import usable_threads
from qoff.measure.machine import package_version, processor_features
from qoff.settings import cache_directory
from qoff.units import format_size

_PACKAGES = ("qoff", "torch", "triton", "transformers", "numba", "safetensors", "gguf")


def describe(path: Path) -> dict[str, Any]:
    """Return names and values for a table; `path` chooses the disk. Sizes are text."""
    memory, disk = psutil.virtual_memory(), shutil.disk_usage(path)
    found: dict[str, Any] = {name: package_version(name) for name in _PACKAGES}
    found |= {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": " ".join(processor_features()) or "generic",
        "threads": usable_threads(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": f"{format_size(memory.total)}, {format_size(memory.available)} available",
        "disk": f"{format_size(disk.total)}, {format_size(disk.free)} free ({path.resolve()})",
        "gpu": _gpus(),
        "cache": str(cache_directory()),
    }
    return found


def _gpus() -> str:
    if not torch.cuda.is_available():
        return "none that torch can use"
    devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return ", ".join(f"{d.name} {format_size(d.total_memory)}" for d in devices)
