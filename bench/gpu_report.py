"""What `bench.gpu` found: rows, targets, JSON. Needs nothing installed but torch."""

from __future__ import annotations

import json
import platform
import re
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from bench.cuda_timer import Timing
from bench.gpu_case import Case
from bench.gpu_ceilings import Ceilings
from bench.gpu_targets import TARGETS, Target
from qoff.measure.tables import markdown

RESULTS = Path(__file__).resolve().parent / "results"
_PACKAGES = ("torch", "triton", "gemlite")
_HEADER = ("op, model, case", "us", "launched", "GB/s", "eta", "TFLOP/s", "beside (peer/ours)")


@dataclass(frozen=True)
class CaseResult:
    """One case, timed; seconds are medians. `missing` peers have the reason."""

    op: str
    model: str
    name: str
    seconds: float
    launched_seconds: float
    spread: float
    captured: bool
    nbytes: int
    flops: float
    m: int
    tokens: int
    group: int
    stored: int
    peers: dict[str, float] = field(default_factory=dict)  # seconds
    peers_launched: dict[str, float] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def of(
        case: Case, ours: Timing, peers: dict[str, Timing], missing: dict[str, str]
    ) -> CaseResult:
        return CaseResult(
            case.op,
            case.model,
            case.name,
            ours.seconds,
            ours.launched_seconds,
            ours.spread,
            ours.captured,
            case.nbytes,
            case.flops,
            case.m,
            case.tokens,
            case.group,
            case.stored,
            {name: timing.seconds for name, timing in peers.items()},
            {name: timing.launched_seconds for name, timing in peers.items()},
            missing,
        )

    def figure(self, target: Target, ceilings: Ceilings) -> float | None:
        """The figure that a target bounds; None where the case or its peers do not have it."""
        ranges = (getattr(target, name) for name in target.ranges)
        values = (getattr(self, name) for name in target.ranges)
        inside = all(low <= v <= high for v, (low, high) in zip(values, ranges, strict=True))
        if self.op != target.op or not inside:
            return None
        if target.figure == "eta":
            return self.nbytes / self.seconds / ceilings.bandwidth
        if target.figure == "eta of a copy":
            return self.nbytes / self.seconds / ceilings.copy
        others = [s for name, s in self.peers.items() if name.startswith(target.peer)]
        return min(others) / self.seconds if others else None


@dataclass
class GpuReport:
    """Everything of one run. `checks` is (op, name, error, bound, what was raised).

    failed: errors outside of checks, a line each. skipped: what there was no time or memory for.
    """

    settings: dict[str, Any]
    capability: int
    gpu: str
    ceilings: Ceilings | None = None
    checks: list[tuple[str, str, float, float, str]] = field(default_factory=list)
    results: list[CaseResult] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    @property
    def wrong(self) -> list[str]:
        """A line for each check that failed."""
        return [
            f"{op}: {name}: {raised or f'error {error:.3g}, at most {bound:.3g}'}"
            for op, name, error, bound, raised in self.checks
            if raised or not error <= bound
        ]

    def target_rows(self) -> list[dict[str, Any]]:
        """Each target with the median and the worst of its cases; met if the worst is."""
        rows = []
        for target in TARGETS:
            found = [self._figure(r, target) for r in self.results]
            figures = [f for f in found if f is not None]
            worst = min(figures, default=None)
            wanted = target.bound(self.capability)
            rows.append(
                {
                    "op": target.op,
                    "what": target.what,
                    "figure": f"{target.figure} {target.peer}".strip(),
                    "wanted": wanted,
                    "cases": len(figures),
                    "median": statistics.median(figures) if figures else None,
                    "worst": worst,
                    "met": None if worst is None else worst >= wanted,
                }
            )
        return rows

    def _figure(self, result: CaseResult, target: Target) -> float | None:
        return None if self.ceilings is None else result.figure(target, self.ceilings)

    def text(self) -> str:
        """The tables that are printed."""
        parts = [f"{self.gpu}, compute capability {self.capability / 10}"]
        if self.ceilings:
            c = self.ceilings
            parts.append(
                f"read {c.read / 1e9:.0f} GB/s, copy {c.copy / 1e9:.0f} GB/s, "
                f"cuBLAS fp16 {c.fp16 / 1e12:.0f} and bf16 {c.bf16 / 1e12:.0f} TFLOP/s"
            )
        failed = len(self.wrong)
        parts.append(f"{len(self.checks)} checks against the reference, {failed} failed")
        parts += self.wrong
        if self.results:
            parts.append(_table(_HEADER, [self._row(result) for result in self.results]))
            header = ("target", "figure", "wanted", "cases", "median", "worst", "")
            parts.append(_table(header, [_target_row(row) for row in self.target_rows()]))
            parts += [f"not measured: {line}" for line in _missing(self.results)]
        parts += [f"skipped: {line}" for line in self.skipped]
        return "\n".join([*parts, *(f"FAILED: {line}" for line in self.failed)])

    def _row(self, r: CaseResult) -> tuple[str, ...]:
        bandwidth = self.ceilings.bandwidth if self.ceilings else float("inf")
        beside = [f"{name} {s / r.seconds:.2f}" for name, s in r.peers.items()]
        return (
            f"{r.op} {r.model} {r.name}" + ("" if r.captured else " (no graph)"),
            f"{r.seconds * 1e6:.1f}",
            f"{r.launched_seconds * 1e6:.1f}",
            f"{r.nbytes / r.seconds / 1e9:.0f}",
            f"{r.nbytes / r.seconds / bandwidth:.2f}",
            f"{r.flops / r.seconds / 1e12:.1f}" if r.flops else "-",
            ", ".join(beside) or "-",
        )

    def content(self) -> dict[str, Any]:
        """All of it for JSON."""
        return {
            "bench": "gpu",
            "date": time.strftime("%Y-%m-%d"),
            "settings": self.settings,
            "machine": {
                "gpu": self.gpu,
                "capability": self.capability,
                "system": f"{platform.system()} {platform.release()}",
                "cuda": torch.version.cuda,
            },
            "versions": versions(),
            "ceilings": asdict(self.ceilings) if self.ceilings else None,
            "checks": [
                dict(zip(("op", "name", "error", "bound", "raised"), check, strict=True))
                for check in self.checks
            ],
            "results": [asdict(result) for result in self.results],
            "targets": self.target_rows(),
            "failed": self.failed,
            "skipped": self.skipped,
        }

    def write(self, out: Path | None) -> Path:
        """Write the JSON, by default bench/results/<gpu>-<date>.json; returns its path."""
        stem = re.sub(r"[^a-z0-9]+", "-", self.gpu.lower()).strip("-")
        path = out or RESULTS / f"{stem}-{time.strftime('%Y-%m-%d')}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.content(), indent=1) + "\n")
        return path


def versions() -> dict[str, str]:
    """Versions of python and of the packages that are measured."""
    found = {"python": sys.version.partition(" ")[0]}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return markdown(header, rows, right=len(header) - 1)


def _target_row(row: dict[str, Any]) -> tuple[str, ...]:
    measured = ["-" if row[k] is None else f"{row[k]:.2f}" for k in ("median", "worst")]
    state = {None: "not measured", True: "met", False: "NOT MET"}[row["met"]]
    name = f"{row['op']}: {row['what']}"
    return (name, row["figure"], f"{row['wanted']:.2f}", str(row["cases"]), *measured, state)


def _missing(results: Sequence[CaseResult]) -> list[str]:
    """Each peer and reason once."""
    found = {f"{r.op}: {peer}: {why}": None for r in results for peer, why in r.missing.items()}
    return list(found)
