"""`qoff env`: what qoff finds on the machine."""

from __future__ import annotations

import os
import platform
import re
import shutil
from pathlib import Path
from typing import Any

import psutil
import torch

from qoff.budgets import CPU, resolve_device, unusable_gpu
from qoff.errors import OpError
from qoff.kernels.processor import usable_threads
from qoff.measure.machine import package_version, processor_features
from qoff.plan.machine import usable_memory
from qoff.settings import cache_directory
from qoff.system_memory import left_by_limits
from qoff.units import format_size

_PACKAGES = ("qoff", "torch", "triton", "transformers", "numba", "safetensors", "gguf")


def describe(path: Path, spill: Path) -> dict[str, Any]:
    """Return names and values for a table; `path` chooses the disk. Sizes are text.

    spill: the folder of what plans have on the disk tier.
    """
    memory, disk, left = psutil.virtual_memory(), shutil.disk_usage(path), left_by_limits()
    limit = "" if left is None else f", {format_size(left)} left by the limit of its cgroup"
    gpus = _gpus()
    try:
        usable = usable_memory(resolve_device("auto"), spill)
    except OpError as error:
        usable, gpus = usable_memory(CPU, spill), f"{gpus} (not usable: {error})"
    found: dict[str, Any] = {name: package_version(name) for name in _PACKAGES}
    found |= {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": " ".join(processor_features()) or "generic",
        "threads": usable_threads(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": f"{format_size(memory.total)}, {format_size(memory.available)} available{limit}",
        "disk": f"{format_size(disk.total)}, {format_size(disk.free)} free ({path.resolve()})",
        "gpu": gpus,
        "cuda": f"{torch.version.cuda or 'none'} of torch, driver {_driver()}",
        "plans may use": ", ".join(f"{tier} {format_size(n)}" for tier, n in usable.items() if n),
        "cache": str(cache_directory()),
    }
    return found


def measured(path: Path, spill: Path, save: Path | None) -> dict[str, str]:
    """Measure the machine, keep what was found, and return it for a table."""
    from qoff.measure.profile import keep, measured_profile

    profile = measured_profile(resolve_device("auto"), path, spill)
    kept = keep(profile)
    if save is not None:
        save.write_text(profile.text())
    links = {
        "disk reads": profile.disk_read,
        "disk writes": profile.disk_write,
        "to the device": profile.to_device,
        "from the device": profile.from_device,
    }
    found = {
        name: f"{link.bytes_per_s / 1e9:.2f} GB/s, {link.request_s * 1e6:.0f} us a request, "
        f"{link.cpu_s_per_byte * 1e9:.2f} s of a core a GB"
        for name, link in links.items()
    }
    matmul = (f"{2 * m / s / 1e9:.0f} at {m:g}" for m, s in profile.device.matmul["4"])
    found["4-bit matmul"] = f"{', '.join(matmul)} rows (Gflop/s)"
    return {**found, "profile": str(kept)}


def _gpus() -> str:
    if not torch.cuda.is_available():
        return "none that torch can use"
    return ", ".join(_gpu(torch.device("cuda", i)) for i in range(torch.cuda.device_count()))


def _gpu(device: torch.device) -> str:
    found, why = torch.cuda.get_device_properties(device), unusable_gpu(device)
    size, capability = format_size(found.total_memory), f"{found.major}.{found.minor}"
    told = f"{found.name} {size}, compute capability {capability}"
    return f"{told} (not usable: {why})" if why else told


def _driver(file: Path = Path("/proc/driver/nvidia/version")) -> str:
    """The version of NVIDIA's driver."""
    try:
        found = re.search(r"Kernel Module.*?\s(\d+(\.\d+)+)\s", file.read_text())
    except OSError:
        return "none"
    return "of an unknown version" if found is None else found[1]
