"""One number measured several times, and how busy the machine was meanwhile."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

QUIET = 0.1  # of a core, used by others


@dataclass(frozen=True)
class Samples:
    """One number measured several times."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def sd(self) -> float:
        """Standard deviation of the population that the values are a sample of; 0 for one value."""
        return statistics.stdev(self.values) if len(self.values) > 1 else 0.0

    @property
    def spread(self) -> float:
        """Interquartile range over the median; the whole range below four values."""
        values = sorted(self.values)
        low, high = values[0], values[-1]
        if len(values) >= 4:
            low, _, high = statistics.quantiles(values, n=4, method="inclusive")
        return (high - low) / self.median

    def summary(self) -> dict[str, Any]:
        """Return median, spread and values for JSON."""
        return {"median": self.median, "spread": self.spread, "values": self.values}


def foreign_cpu_s() -> float:
    """CPU seconds that other processes, or other machines on the same host, took since boot."""
    import psutil  # a machine with little more than torch measures, too

    times = psutil.cpu_times()
    busy = sum(times) - times.idle - times.iowait - times.guest - times.guest_nice
    return float(busy - time.process_time())
