"""What every bench does alike: interleaved samples, the machine's description, table and JSON."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.table import Table

from qoff.kernels.cpu.emit import host_features

RESULTS = Path(__file__).resolve().parent / "results"
_PACKAGES = ("qoff", "torch", "transformers", "numba", "accelerate", "xllamacpp")
_FEATURES = ("avx2", "avx512f", "avx512vnni", "avxvnni", "avx512bf16", "amx-int8", "neon")
_WIDTH = 170  # columns of a table that goes into a file
_QUIET = 0.1  # of a core, used by others
_PAUSE_S = 0.02  # idle threads of the alternative before have stopped spinning by then


@dataclass(frozen=True)
class Samples:
    """One number measured several times."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

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


@dataclass(frozen=True)
class Bar:
    """A figure that the project wants reached, and what was measured."""

    what: str
    wanted: float
    measured: float

    @property
    def met(self) -> bool:
        return self.measured >= self.wanted

    def line(self) -> str:
        state = "met" if self.met else "NOT MET"
        return f"{state}: {self.what}: {self.measured:.3f}, wanted at least {self.wanted:g}"


@dataclass
class Report:
    """What one run of a bench found."""

    name: str
    settings: dict[str, Any]
    title: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]] = field(default_factory=list)
    measured: dict[str, Any] = field(default_factory=dict)
    ratios: dict[str, Any] = field(default_factory=dict)
    bars: list[Bar] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def publish(self, out: Path | None) -> Path:
        """Print the table and write the JSON, by default into bench/results; returns its path."""
        table = Table(title=self.title, title_justify="left")
        for i, name in enumerate(self.header):
            table.add_column(name, justify="right" if i else "left", no_wrap=True)
        for row in self.rows:
            table.add_row(*row)
        console = Console()
        if not console.is_terminal:
            console.width = _WIDTH
        console.print(table)
        for line in [*self.notes, *(bar.line() for bar in self.bars)]:
            print(line)
        found = machine()
        cpu = re.sub(r"[^a-z0-9]+", "-", found["cpu"].lower()).strip("-")
        path = out or RESULTS / f"{self.name}-{cpu}-{time.strftime('%Y-%m-%d')}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "bench": self.name,
            "date": time.strftime("%Y-%m-%d"),
            "settings": self.settings,
            "machine": found,
            "versions": versions(),
            "measured": self.measured,
            "ratios": self.ratios,
            "bars": [{**asdict(bar), "met": bar.met} for bar in self.bars],
            "notes": self.notes,
        }
        path.write_text(json.dumps(content, indent=1) + "\n")
        return path


def arguments(
    description: str | None, argv: Sequence[str] | None, **options: tuple[type, Any, str]
) -> argparse.Namespace:
    """Parse --quick, --out and a bench's own options, each (type, default, help)."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small cases, few rounds")
    parser.add_argument("--out", type=Path, help="JSON file; default in bench/results")
    for name, (kind, default, text) in options.items():
        flag = f"--{name.replace('_', '-')}"
        if kind is bool:
            parser.add_argument(flag, action="store_true", help=text)
        else:
            parser.add_argument(flag, type=kind, default=default, help=text)
    return parser.parse_args(argv)


def interleaved(
    alternatives: Mapping[str, Callable[[], float]],
    rounds: int,
    pause: float = _PAUSE_S,
    foreign: Callable[[], float] | None = None,
) -> dict[str, Samples]:
    """Sample the alternatives in turn, A B C B C A ..., so that all see the same noise.

    Each callable measures itself once and returns its number. On a shared machine a round in which
    others took more than a tenth of a core (`foreign`: their CPU seconds so far) is repeated, up to
    twice as many rounds in all; the `rounds` that others disturbed least count.
    """
    names, foreign = list(alternatives), foreign or foreign_cpu_s
    found: list[tuple[float, dict[str, float]]] = []
    quiet = 0
    while quiet < rounds and len(found) < 2 * rounds:
        first = len(found) % len(names)
        before, start = foreign(), time.perf_counter()
        values = {}
        for name in names[first:] + names[:first]:
            time.sleep(pause)
            values[name] = alternatives[name]()
        others = (foreign() - before) / (time.perf_counter() - start)
        quiet += others < _QUIET
        found.append((others, values))
    kept = sorted(found, key=lambda entry: entry[0])[:rounds]
    return {name: Samples(tuple(values[name] for _, values in kept)) for name in names}


def foreign_cpu_s() -> float:
    """CPU seconds that other processes, or other machines on the same host, took since boot."""
    times = psutil.cpu_times()
    busy = sum(times) - times.idle - times.iowait - times.guest - times.guest_nice
    return float(busy - time.process_time())


def timed(call: Callable[[], object], least_s: float = 0.02) -> Callable[[], float]:
    """Return a measurement: seconds of one call, averaged over calls of `least_s` together."""
    call()
    start = time.perf_counter()
    call()
    calls = max(1, round(least_s / (time.perf_counter() - start)))

    def measure() -> float:
        call()  # wakes the threads
        start = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - start) / calls

    return measure


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Let torch use `count` threads for the length of a `with` block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def machine() -> dict[str, Any]:
    """Return what the figures depend on; nothing that names the machine itself."""
    return {
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
