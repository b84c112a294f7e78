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

_PACKAGES = ("qoff", "torch", "triton", "transformers", "numba", "accelerate", "xllamacpp")
_FEATURES = ("avx2", "avx512f", "avx512vnni", "avxvnni", "avx512bf16", "amx-int8", "neon")


def machine(gpu: str = "") -> dict[str, Any]:
    """Return what the figures depend on; nothing that names the machine itself.

    gpu: what its maker calls it, for figures of one; "gpu" is in the answer then.
    """
    return {
        **({"gpu": gpu} if gpu else {}),
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "features": [f for f in _FEATURES if f in host_features()],
        "l3_bytes": l3_bytes(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.release()}",
        "load_1min": round(os.getloadavg()[0], 2),
    }


def versions() -> dict[str, str]:
    """Return the versions of python and of the packages that are measured."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def l3_bytes() -> int:
    """Bytes of the last-level cache as sysconf tells them; 32 MiB where it does not."""
    known = "SC_LEVEL3_CACHE_SIZE" in os.sysconf_names
    return (os.sysconf("SC_LEVEL3_CACHE_SIZE") if known else 0) or 32 << 20


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
