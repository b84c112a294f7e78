"""What `bench.gpu` found: rows, targets, text and JSON, which it reads again to go on."""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from bench.gpu import training
from bench.gpu.case import CaseSize, SerialChain, TimedCase
from bench.gpu.ceilings import Ceilings
from bench.gpu.targets import TARGETS, GpuTarget
from bench.gpu.timer import CallTimes
from qoff.measure.tables import markdown

_PACKAGES = ("torch", "triton", "transformers", "gemlite")
_HEADER = ("op, model, case", "us", "launched", "GB/s", "eta", "TFLOP/s", "beside (peer/ours)")


@dataclass(frozen=True, kw_only=True)
class CaseResult(CaseSize):
    """One case, timed; seconds are medians. `missing` peers have the reason."""

    seconds: float
    launched_seconds: float
    spread: float
    captured: bool
    peers: dict[str, float] = field(default_factory=dict)  # seconds
    peers_launched: dict[str, float] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    calls: int = 1  # in a graph, each with operands of its own
    chain: dict[str, int] | None = None  # the fields of a SerialChain

    @staticmethod
    def of(
        case: TimedCase,
        ours: CallTimes,
        peers: dict[str, CallTimes],
        missing: dict[str, str],
        chain: SerialChain | None = None,
    ) -> CaseResult:
        return CaseResult(
            **case.size,
            seconds=ours.seconds,
            launched_seconds=ours.launched_seconds,
            spread=ours.spread,
            captured=ours.captured,
            peers={name: timing.seconds for name, timing in peers.items()},
            peers_launched={name: timing.launched_seconds for name, timing in peers.items()},
            missing=missing,
            calls=ours.calls,
            chain=asdict(chain) if chain else None,
        )

    def least_seconds(self, ceilings: Ceilings) -> float | None:
        """What its serial chain takes at least; None for a case without one."""
        chain = SerialChain(**self.chain) if self.chain else None
        return ceilings.chain_seconds(chain, self.nbytes) if chain else None

    def figure(self, target: GpuTarget, ceilings: Ceilings) -> float | None:
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
        if target.figure == "chain":
            least = self.least_seconds(ceilings)
            return None if least is None else least / self.seconds
        others = [s for name, s in self.peers.items() if name.startswith(target.peer)]
        return min(others) / self.seconds if others else None


@dataclass
class GpuReport:
    """Everything of one run. `checks` is (op, name, error, bound, what was raised).

    gpu: of the event "gpu"; empty before it is known. failed: errors outside of checks, a line
    each. skipped: what memory does not hold. late: what was left out, mostly for lack of time, by
    stage and op.
    done: timings and searches that are over, failed ones too. compiled: a row for each kernel.
    tests: how the GPU tests went. training: a row for each kind of `bench.gpu.training`. tuned: op,
    key, configuration.
    """

    settings: dict[str, Any]
    gpu: dict[str, Any] = field(default_factory=dict)
    ceilings: Ceilings | None = None
    checks: list[tuple[str, str, float, float, str]] = field(default_factory=list)
    results: list[CaseResult] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    done: list[str] = field(default_factory=list)
    compiled: list[dict[str, Any]] = field(default_factory=list)
    tests: dict[str, Any] = field(default_factory=dict)
    training: list[dict[str, Any]] = field(default_factory=list)
    tuned: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)  # of each stage
    late: dict[str, list[str]] = field(default_factory=dict)

    @staticmethod
    def read(text: str) -> GpuReport:
        """That of an earlier call, to go on with; what it had no time for is forgotten."""
        content = json.loads(text)
        names = {f.name for f in fields(GpuReport)} - {"late"}
        report = GpuReport(**{name: content[name] for name in names})
        report.checks = [tuple(check.values()) for check in content["checks"]]
        report.results = [CaseResult(**result) for result in content["results"]]
        report.ceilings = Ceilings(**content["ceilings"]) if content["ceilings"] else None
        return report

    def add(self, event: Mapping[str, Any]) -> None:
        """Take up what a child reports; see `work`."""
        if "item" in event:
            self.done.append(event["item"])
        for name in ("gpu", "tests"):
            if name in event:
                setattr(self, name, event[name])
        for name in ("compiled", "failed", "skipped", "training"):
            if name in event:
                getattr(self, name).append(event[name])
        if "check" in event:
            self.checks.append(tuple(event["check"]))
        if "ceilings" in event:
            self.ceilings = Ceilings(**event["ceilings"])
        if "result" in event:
            self.results.append(CaseResult(**event["result"]))
            self.done.append(self.results[-1].key)
        if event.get("tuned", [None])[-1]:
            op, key, fields = event["tuned"]
            self.tuned.setdefault(op, {})[key] = fields

    @property
    def capability(self) -> int:
        """90 for 9.0; that whose configurations fit."""
        return int(self.gpu.get("capability", 0))

    @property
    def wrong(self) -> list[str]:
        """A line for each check that failed, and each training with other losses than the CPU's."""
        found = [
            f"{op}: {name}: {raised or f'error {error:.3g}, at most {bound:.3g}'}"
            for op, name, error, bound, raised in self.checks
            if raised or not error <= bound
        ]
        bad = [row for row in self.training if not row["difference"] <= row["bound"]]
        return found + [training.line(row) for row in bad]

    def target_rows(self) -> list[dict[str, Any]]:
        """Each target with the median and the worst of its cases; met if the worst is."""
        rows = []
        for target in TARGETS:
            found = [self._figure(r, target) for r in self.results]
            figures = [f for f in found if f is not None]
            worst = min(figures, default=None)
            wanted = target.bound(self.capability)
            if wanted is None:
                continue
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

    def _figure(self, result: CaseResult, target: GpuTarget) -> float | None:
        return None if self.ceilings is None else result.figure(target, self.ceilings)

    def text(self) -> str:
        """The tables that are printed."""
        exact = self.gpu.get("exact", 0) / 10
        parts = [f"{self.gpu.get('name', 'no GPU')}, compute capability {exact}"]
        if self.ceilings:
            c = self.ceilings
            parts.append(
                f"read {c.read / 1e9:.0f} GB/s, copy {c.copy / 1e9:.0f} GB/s, "
                f"cuBLAS fp16 {c.fp16 / 1e12:.0f} and bf16 {c.bf16 / 1e12:.0f} TFLOP/s, "
                f"pinned link {c.link / 1e9:.1f} GB/s, a launch {c.launch * 1e6:.2f} us, "
                f"a load {c.latency * 1e9:.0f} ns"
            )
        parts += self._compiled_text()
        if self.tests:
            parts.append(f"pytest -m gpu: {self.tests['summary']}")
        parts += [training.line(row) for row in self.training]
        failed = len(self.wrong)
        parts.append(f"{len(self.checks)} checks against the reference, {failed} failed")
        parts += self.wrong
        if self.results:
            parts.append(_table(_HEADER, [self._row(result) for result in self.results]))
            header = ("target", "figure", "wanted", "cases", "median", "worst", "")
            parts.append(_table(header, [_target_row(row) for row in self.target_rows()]))
            parts += [f"not measured: {line}" for line in _missing(self.results)]
        tuned = [(op, key, e) for op, keys in self.tuned.items() for key, e in keys.items()]
        parts += [f"tuned: {op} {key}: {entry}" for op, key, entry in tuned]
        parts += [f"skipped: {line}" for line in self.skipped]
        for what, names in self.late.items():
            few = ", ".join(names)
            many = f"{names[0]} to {names[-1]}, {len(names)} in all"
            parts.append(f"left out: {what}: {few if len(names) < 4 else many}")
        parts.append(" ".join(f"{stage} {s:.0f} s" for stage, s in self.seconds.items()))
        return "\n".join([*parts, *(f"FAILED: {line}" for line in self.failed)])

    def _compiled_text(self) -> list[str]:
        if not self.compiled:
            return []
        bad = [row for row in self.compiled if row["error"]]
        spilling = sum(bool(row.get("spilled")) for row in self.compiled)
        total = sum(row["seconds"] for row in self.compiled)
        first = f"{len(self.compiled)} kernels compiled in {total:.0f} s of CPU time"
        lines = [f"{first}, {len(bad)} failed, {spilling} spill registers"]
        return lines + [f"does not compile: {r['op']} {r['kernel']}: {r['error']}" for r in bad]

    def _row(self, r: CaseResult) -> tuple[str, ...]:
        bandwidth = self.ceilings.bandwidth if self.ceilings else float("inf")
        beside = [f"{name} {s / r.seconds:.2f}" for name, s in r.peers.items()]
        least = r.least_seconds(self.ceilings) if self.ceilings else None
        if least is not None:
            beside = [f"limit of latencies {least * 1e6:.1f} us", *beside]
        return (
            r.key + ("" if r.captured else " (no graph)"),
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
            "gpu": self.gpu,
            "system": f"{platform.system()} {platform.release()}",
            "seconds": self.seconds,
            "compiled": self.compiled,
            "tests": self.tests,
            "training": self.training,
            "versions": versions(),
            "ceilings": asdict(self.ceilings) if self.ceilings else None,
            "checks": [
                dict(zip(("op", "name", "error", "bound", "raised"), check, strict=True))
                for check in self.checks
            ],
            "results": [asdict(result) for result in self.results],
            "targets": self.target_rows(),
            "tuned": self.tuned,
            "failed": self.failed,
            "skipped": self.skipped,
            "late": self.late,
            "done": self.done,
        }


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
