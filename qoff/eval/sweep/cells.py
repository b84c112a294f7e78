"""Results of a sweep's cells: tables, and charts of what is lost against what is saved."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from qoff.eval.charts import new_figure, save
from qoff.measure import tables
from qoff.schema import json_text

_SIZE = (8.0, 5.0)  # inches
_LABELS = {"perplexity": "perplexity", "mean_kl": "mean KL from the reference, nats"}
Point = tuple[float, float]


@dataclass(frozen=True)
class CellResult:
    """What one cell gave. found: `Summary.as_dict`. tokens_per_s: None if it was not measured."""

    weights: str
    kv: str
    bits_per_weight: float
    kv_bytes_per_token: float
    tokens_per_s: float | None
    found: Mapping[str, float]

    def as_dict(self) -> dict[str, Any]:
        """All numbers side by side, for JSON and CSV."""
        plain = asdict(self)
        return plain | plain.pop("found")

    @classmethod
    def read(cls, text: str) -> Self:
        """One of `json_text`. Raises ValueError or TypeError for other text."""
        kept = cls(**json.loads(text))
        found = {n: math.nan if x is None else x for n, x in dict(kept.found).items()}
        return replace(kept, found=found)


def _found(name: str, form: str, error: str = "") -> Callable[[CellResult], str]:
    """A column of a number that was found, with its standard error if `error` is its format."""

    def show(result: CellResult) -> str:
        if name not in result.found:
            return "-"
        text = format(result.found[name], form)
        if not error:
            return text
        spread = result.found[f"{name}_error"]
        return f"{text} ± {'-' if math.isnan(spread) else format(spread, error)}"

    return show


_COLUMNS: dict[str, Callable[[CellResult], str]] = {
    "weights": lambda r: r.weights,
    "KV cache": lambda r: r.kv,
    "bits/weight": lambda r: f"{r.bits_per_weight:.2f}" if r.bits_per_weight else "-",
    "KV bytes/token": lambda r: f"{r.kv_bytes_per_token:.0f}",
    "perplexity": _found("perplexity", ".3f", ".3f"),
    "ratio": _found("perplexity_ratio", ".4f", ".4f"),
    "mean KL": _found("mean_kl", "z.5f", ".5f"),
    "median KL": _found("median_kl", "z.5f"),
    "99 % KL": _found("kl_99", "z.5f"),
    "same top": _found("same_top", ".2%"),
    "tok/s": lambda r: "-" if r.tokens_per_s is None else f"{r.tokens_per_s:.1f}",
}


def markdown(results: Sequence[CellResult]) -> str:
    """A table for a document."""
    rows = [[show(result) for show in _COLUMNS.values()] for result in results]
    return tables.markdown(list(_COLUMNS), rows, right=len(_COLUMNS) - 2) + "\n"


def as_csv(results: Sequence[CellResult]) -> str:
    """All numbers in full."""
    rows = [result.as_dict() for result in results]
    return tables.comma_separated(list(rows[0]), [list(row.values()) for row in rows]) + "\n"


def as_json(results: Sequence[CellResult]) -> str:
    """The same as a list of objects; null for a number that is not finite."""
    return json_text([result.as_dict() for result in results], indent=1) + "\n"


def pareto(points: Sequence[Point]) -> list[Point]:
    """Those that no other beats: none has less of both, or less of one and as much of the other."""
    best: list[Point] = []
    for point in sorted(points):
        if not best or point[1] < best[-1][1]:
            best.append(point)
    return best


def draw(results: Sequence[CellResult], folder: Path) -> list[Path]:
    """Draw perplexity and KL against bits per weight, or bytes of the cache if only those differ.

    Raises QoffError without matplotlib.
    """
    paths = []
    for name, what in (("perplexity", "perplexity"), ("kl", "mean_kl")):
        shown = [result for result in results if what in result.found]
        if len(shown) > 1:
            paths += _draw(shown, what, folder / name)
    return paths


def _draw(results: Sequence[CellResult], what: str, path: Path) -> list[Path]:
    by_weights = len({r.bits_per_weight for r in results}) > 1
    points: dict[str, list[Point]] = {}  # by what the other axis of the grid is
    for r in results:
        x = r.bits_per_weight if by_weights else r.kv_bytes_per_token
        points.setdefault(r.kv if by_weights else r.weights, []).append((x, r.found[what]))
    figure = new_figure(*_SIZE)
    axes = figure.add_subplot()
    for name, mine in points.items():
        axes.scatter(*zip(*mine, strict=True), label=name, s=24)
    front = pareto([point for mine in points.values() for point in mine])
    axes.plot(*zip(*front, strict=True), "k--", linewidth=1, label="Pareto front")
    if what == "mean_kl" and min(r.found[what] for r in results) > 0:
        axes.set_yscale("log")
    axes.set_xlabel("bits per weight" if by_weights else "KV bytes per token")
    axes.set_ylabel(_LABELS[what])
    axes.grid(True, which="both", alpha=0.25)
    axes.legend(fontsize="small")
    return save(figure, path)
