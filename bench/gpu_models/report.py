"""What `bench.gpu_models` found: rows, bars, text and JSON, which it reads again to go on."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from bench.gpu.report import versions
from bench.gpu_models.rows import Row
from bench.harness import Bar
from qoff.measure.tables import markdown

LINK_SHARE, FLEXGEN_FACTOR, STREAMS = 0.95, 3.0, 0.5
# Tokens per second on a T4 (16 GB), prompt 512, answer 32, without and with compression. Source:
# FlexGen's README.
PUBLISHED: Mapping[str, tuple[float, float]] = {
    "opt-6.7b": (25.26, 29.12),
    "opt-30b": (7.32, 8.70),
    "opt-175b": (0.69, 1.12),
}
_HEADER = (
    "model, budget, system, batches",
    "tokens/s",
    "decode/s",
    "prefill s",
    "link GB/s",
    "disk GB/s",
    "GPU idle",
    "peak GB",
)


@dataclass(frozen=True)
class Measured:
    """One row. tokens_per_s: all new tokens over prefill and decode, as FlexGen counts them.

    link, disk: bytes per second of a decode round, and of nothing but copies or reads. idle: part
    of decode in which the GPU computes no step. waits: parts of decode by what was waited for.
    tiers: bytes that the plan takes. Seconds, bytes; None where a system does not tell.
    """

    key: str
    model: str
    system: str
    budget: str
    compressed: bool
    tokens_per_s: float
    prefill_s: float
    decode_tokens_per_s: float | None = None
    round_s: float | None = None
    link_bytes_per_s: float | None = None
    link_alone: float | None = None
    disk_bytes_per_s: float | None = None
    disk_alone: float | None = None
    idle: float | None = None
    waits: dict[str, float] = field(default_factory=dict)
    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    budget_bytes: int | None = None
    tiers: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @staticmethod
    def of(row: Row, found: Mapping[str, Any]) -> Measured:
        compressed = row.system == "qoff" or "--compress-weight" in row.flags
        return Measured(row.key, row.model, row.system, row.budget, compressed, **found)

    @property
    def link_share(self) -> float | None:
        """Of the link, where moving is what a round mostly does."""
        return _share(self.link_bytes_per_s, self.link_alone)

    @property
    def disk_share(self) -> float | None:
        return _share(self.disk_bytes_per_s, self.disk_alone)


def _share(rate: float | None, alone: float | None) -> float | None:
    return rate / alone if rate and alone else None


@dataclass
class ModelReport:
    """Everything of one run. written: bytes and seconds of each model. failed: reasons, by row.

    late: rows that there was no time for. took: seconds of each process.
    """

    settings: dict[str, Any]
    gpu: dict[str, Any] = field(default_factory=dict)
    results: list[Measured] = field(default_factory=list)
    written: dict[str, dict[str, float]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    late: list[str] = field(default_factory=list)
    took: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    @staticmethod
    def read(text: str) -> ModelReport:
        """That of an earlier call, to go on with: what failed or had no time is tried again."""
        content = json.loads(text)
        kept = {f.name: content[f.name] for f in fields(ModelReport)}
        results = [Measured(**one) for one in kept.pop("results")]
        return ModelReport(**{**kept, "results": results, "late": []})

    @property
    def done(self) -> set[str]:
        return {one.key for one in self.results}

    def bars(self) -> list[Bar]:
        """Link of decode rounds that are bound by it, FlexGen, budgets."""
        return [*self._links(), *self._beside_flexgen(), *self._budgets()]

    def _links(self) -> Iterator[Bar]:
        for one in self._ours():
            shares = {"link": one.link_share or 0.0, "disk": one.disk_share or 0.0}
            name = max(shares, key=lambda name: shares[name])
            if shares[name] >= STREAMS:
                what = f"{one.key}: {name}, of what it does alone"
                yield Bar(what, LINK_SHARE, shares[name])

    def _beside_flexgen(self) -> Iterator[Bar]:
        """The best of ours against the best of FlexGen compressed, at the same budget."""
        best: dict[tuple[str, str], float] = {}
        for one in self.results:
            if one.system == "flexgen" and one.compressed:
                at = (one.model, one.budget)
                best[at] = max(best.get(at, 0.0), one.tokens_per_s)
        for (model, budget), theirs in best.items():
            mine = [o.tokens_per_s for o in self._ours() if (o.model, o.budget) == (model, budget)]
            if mine:
                what = f"{model}, {budget}: tokens/s over FlexGen compressed"
                yield Bar(what, FLEXGEN_FACTOR, max(mine) / theirs)

    def _budgets(self) -> Iterator[Bar]:
        for one in self._ours():
            if one.peak_bytes and one.budget_bytes:
                share = one.budget_bytes / one.peak_bytes
                yield Bar(f"{one.key}: budget over peak memory", 1.0, share)

    def _ours(self) -> list[Measured]:
        return [one for one in self.results if one.system == "qoff"]

    def text(self) -> str:
        """The tables that are printed."""
        gpu = self.gpu
        parts = [f"{gpu.get('name', 'no GPU')}, {gpu.get('memory', 0) / 1e9:.0f} GB"]
        for name, one in self.written.items():
            parts.append(f"wrote {name}: {one['bytes'] / 1e9:.1f} GB in {one['seconds']:.0f} s")
        if self.results:
            rows = [_row(one) for one in self.results]
            parts.append(markdown(_HEADER, rows, right=len(_HEADER) - 1))
            parts.append(self._flexgen_table())
        parts += [f"{one.key}: {note}" for one in self.results for note in one.notes]
        parts += [bar.line() for bar in self.bars()]
        parts += [f"left out: {key}" for key in self.late]
        parts += [f"FAILED: {key}: {why}" for key, why in self.failed.items()]
        return "\n".join([*parts, f"{self.seconds:.0f} s"])

    def _flexgen_table(self) -> str:
        """FlexGen's own table: what it published for a T4, and what was measured here at 16 GB."""
        rows = []
        for model, published in PUBLISHED.items():
            here = [one for one in self.results if (one.model, one.budget) == (model, "16GB")]
            cells = [f"{rate:.2f}" for rate in published]
            for wanted in (("flexgen", False), ("flexgen", True), ("qoff", True)):
                rates = [o.tokens_per_s for o in here if (o.system, o.compressed) == wanted]
                cells.append(f"{max(rates):.2f}" if rates else "-")
            rows.append((model, *cells))
        header = ("tokens/s at 16 GB", "T4, published", "compressed", "FlexGen here")
        return markdown((*header, "compressed", "qoff"), rows, right=5)

    def content(self) -> dict[str, Any]:
        """All of it for JSON."""
        return {
            "bench": "gpu_models",
            "date": time.strftime("%Y-%m-%d"),
            "system": f"{platform.system()} {platform.release()}",
            "versions": versions(),
            **asdict(self),
            "bars": [{**asdict(bar), "met": bar.met} for bar in self.bars()],
        }


def _row(one: Measured) -> Sequence[str]:
    def number(value: float | None, digits: int = 1) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    def rate(value: float | None, share: float | None) -> str:
        return f"{value / 1e9:.1f} ({share:.0%})" if value and share else "-"

    return (
        one.key,
        number(one.tokens_per_s, 2),
        number(one.decode_tokens_per_s, 2),
        number(one.prefill_s),
        rate(one.link_bytes_per_s, one.link_share),
        rate(one.disk_bytes_per_s, one.disk_share),
        "-" if one.idle is None else f"{one.idle:.0%}",
        "-" if one.peak_bytes is None else f"{one.peak_bytes / 1e9:.2f}",
    )
