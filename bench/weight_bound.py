"""Products that have to read their weights: what `bench.cpu_matmul` and `bench.experts` share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from bench.bandwidth import ReadBandwidth
from bench.harness import Report
from bench.sampling import interleaved, timed
from qoff.errors import QoffError
from qoff.measure.samples import Samples

QOFF = "qoff"
HEADER = ("M", "ms", "spread", "MiB", "GB/s", "of", "eta", "GOP/s")  # of `Case.row`


class Operands(Protocol):
    """Weights of one shape, in the form of each alternative."""

    name: str

    def calls(self, tokens: int) -> dict[str, Callable[[], Tensor]]:
        """Each alternative as a call that computes the product for so many tokens."""

    def size(self, tokens: int) -> tuple[float, int]:
        """Bytes of packed weights that a call reads, and its operations."""


@dataclass(frozen=True)
class Case:
    """One product: bytes of its weights, operations, and seconds of the alternatives."""

    name: str
    tokens: int
    nbytes: float
    ops: int
    seconds: Mapping[str, Samples]
    limit: Samples  # bytes per second of reading memory, sampled in the same rounds

    @property
    def bytes_per_s(self) -> float:
        return self.nbytes / self.seconds[QOFF].median

    @property
    def eta(self) -> float:
        return self.bytes_per_s / self.limit.median

    def ratio(self, peer: str) -> float:
        """How many times faster than a peer qoff is."""
        return self.seconds[peer].median / self.seconds[QOFF].median

    def row(self) -> tuple[str, ...]:
        """As text, under `HEADER`."""
        qoff = self.seconds[QOFF]
        return (
            str(self.tokens), f"{qoff.median * 1e3:.3f}", f"{qoff.spread:.0%}",
            f"{self.nbytes / 2**20:.1f}", f"{self.bytes_per_s / 1e9:.1f}",
            f"{self.limit.median / 1e9:.1f}", f"{self.eta:.2f}",
            f"{self.ops / qoff.median / 1e9:.0f}",
        )  # fmt: skip

    def add_to(self, report: Report, ratios: Mapping[str, float]) -> None:
        """Put what was measured into a report's JSON."""
        key = f"{self.name} M={self.tokens}"
        measured: dict[str, Any] = {
            "weight_bytes": self.nbytes,
            "bytes_per_s": self.bytes_per_s,
            "read_bytes_per_s": self.limit.summary(),
            "eta": self.eta,
            "ops_per_s": self.ops / self.seconds[QOFF].median,
            "seconds": {name: samples.summary() for name, samples in self.seconds.items()},
        }
        report.measured[key], report.ratios[key] = measured, dict(ratios)


def check(operands: Operands, truth: str, names: Sequence[str], tolerance: float) -> None:
    """Raise QoffError unless these alternatives compute what `truth` does, to a part of its RMS."""
    calls = operands.calls(3)
    wanted = calls[truth]().float().clone()
    for name in names:
        error = ((calls[name]().float() - wanted).norm() / wanted.norm()).item()
        if not error < tolerance:
            raise QoffError(f"{name} is off by {error:.1%} at {operands.name}: nothing measured")


def measure(
    shapes: Iterable[Operands],
    tokens: Sequence[int],
    reading: ReadBandwidth,
    rounds: int,
    least_s: float,
) -> list[Case]:
    """Measure every shape at every number of tokens, each sample lasting `least_s` or more."""
    cases, ways = [], reading.ways()
    for operands in shapes:
        for m in tokens:
            calls = {name: timed(call, least_s) for name, call in operands.calls(m).items()}
            seconds = interleaved({**calls, **ways}, rounds)
            size = operands.size(m)
            cases.append(Case(operands.name, m, *size, seconds, reading.best(seconds)))
    return cases
