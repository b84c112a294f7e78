"""Experts one by one: a cache of those that tokens chose, what leaves it, and what would.

`cache` holds experts in slots of the device's arena, `host` those that left it, `policy` says which
of them leave first, `simulator` says how often each policy would have to read, on routes that a run
recorded. `on_cpu` holds those that a CPU computes beside a GPU, `passing` has them pass through it.
"""

from .cache import ExpertCache
from .stats import ExpertStats
from .wave import ExpertWave, StreamedExperts

__all__ = ["ExpertCache", "ExpertStats", "ExpertWave", "StreamedExperts"]
