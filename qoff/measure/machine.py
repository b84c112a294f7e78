"""What figures depend on: the machine, and the versions of what is measured."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch

from qoff.kernels.processor import host_features

_PACKAGES = ("qoff", "torch", "triton", "transformers", "numba", "accelerate")
_FEATURES = ("avx2", "avx512f", "avx512vnni", "avxvnni", "avx512bf16", "amx-int8", "neon")


def machine(gpu: str = "") -> dict[str, Any]:
    """Return what the figures depend on; nothing that names the machine itself.

    gpu: what its maker calls it, for figures of one; "gpu" is in the answer then.
    """
    # Bytes of the last-level cache as sysconf tells them; 32 MiB where it does not.
    l3 = os.sysconf("SC_LEVEL3_CACHE_SIZE") if "SC_LEVEL3_CACHE_SIZE" in os.sysconf_names else 0
    return {
        **({"gpu": gpu} if gpu else {}),
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "features": processor_features(),
        "l3_bytes": l3 or 32 << 20,
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.release()}",
        "load_1min": round(os.getloadavg()[0], 2),
    }


def versions() -> dict[str, str]:
    """Return the versions of python and of the packages that are measured."""
    packages = {package: package_version(package) for package in _PACKAGES}
    return {"python": platform.python_version(), **packages}


def package_version(package: str) -> str:
    """The version of a package, or "not installed"."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def processor_features() -> list[str]:
    """What the processor has of the features that matter to the kernels."""
    return [feature for feature in _FEATURES if feature in host_features()]


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
