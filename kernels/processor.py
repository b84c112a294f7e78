"""What the processor at hand can do, and how many threads it is worth using."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path

from .torch_threads import torch_threads

_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def host_features() -> frozenset[str]:
    """Return the instruction sets that numba compiles for, as LLVM spells them.

    Those of the host, unless numba was told otherwise (NUMBA_CPU_NAME, NUMBA_CPU_FEATURES).
    """
    from numba.core import config
    from numba.core.codegen import get_host_cpu_features

    chosen = config.CPU_FEATURES
    listed = get_host_cpu_features() if chosen is None else chosen
    return frozenset(name[1:] for name in listed.split(",") if name.startswith("+"))


def usable_threads() -> int:
    """Return torch's number of threads, but no more than this process may run at once.

    While torch is kept on one (`one_torch_thread`), it is the number before. A process may be bound
    to some cores, and a container may have a quota of processor time (cgroup v2 `cpu.max`), which
    torch does not look at.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(torch_threads(), allowed or 1, _quota_threads()))


def pool_threads() -> int:
    """Threads that ops on the CPU share their working memory between.

    Those of their pool, once there is one: torch's number may be another one by then.
    """
    loaded = sys.modules.get(f"{__package__}.cpu.jit.pool")  # compiled when it is imported
    if loaded is None or not loaded.default_pool.cache_info().currsize:
        return usable_threads()
    return int(loaded.default_pool().threads)


def _quota_threads() -> int:
    try:
        quota, period = _QUOTA.read_text().split()
        return math.ceil(int(quota) / int(period))
    except (OSError, ValueError):  # no cgroup, or "max": no quota
        return 1 << 30
