"""Every environment variable that qoff reads or sets, and nothing else.

QOFF_CACHE: where models that were converted on the way are kept, and what was measured or verified
once; by default $XDG_CACHE_HOME/qoff, or ~/.cache/qoff.

QOFF_CUDA_GRAPHS: 0 turns CUDA graphs off; by default a GPU replays the steps of decoding as graphs.

QOFF_API_KEY: key that clients of `qoff serve` must send; read by qoff/cli/serve.py.

QOFF_TRITON_36: read by tests/kernels/test_compile.py alone: a folder with Triton 3.6.0, to compile
the kernels with that version too; by default .triton-3.6 (`make triton-3.6`).

The libraries below read their own: HF_HOME, HF_HUB_OFFLINE and HF_TOKEN (downloads),
OMP_NUM_THREADS (threads of torch and so of qoff's CPU kernels), NUMBA_CACHE_DIR (compiled CPU
kernels). For Ray, `qoff batch --ray` sets RAY_USAGE_STATS_ENABLED=0, so that it reports nothing.
`import qoff` sets GOMP_SPINCOUNT, see `shorten_openmp_spins`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

OPENMP_SPINS = 1000  # some 20 to 50 microseconds


def cache_directory() -> Path:
    """Return the directory for converted models; it need not exist yet.

    Without a home, as a user of a container may be, it is one in which nothing can be.
    """
    try:
        if explicit := os.environ.get("QOFF_CACHE"):
            return Path(explicit).expanduser()
        base = os.environ.get("XDG_CACHE_HOME")
        return (Path(base) if base else Path.home() / ".cache") / "qoff"
    except RuntimeError:
        return Path(os.devnull) / "qoff"


def cuda_graphs() -> bool:
    """Return whether decoding on a GPU is recorded and replayed as CUDA graphs."""
    return os.environ.get("QOFF_CUDA_GRAPHS", "1") not in ("", "0")


def shorten_openmp_spins() -> None:
    """Have torch's idle threads sleep early, unless torch is loaded or the user has said how long.

    By default GNU OpenMP's threads spin 300,000 times after each operation that they share, which
    is milliseconds: on the cores that the next forward pass computes on.
    """
    if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(OPENMP_SPINS))
