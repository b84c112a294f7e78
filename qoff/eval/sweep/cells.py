"""Results of a sweep's cells: files that let an interrupted sweep continue, and tables."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from qoff.measure import tables

VERSION = 2


@dataclass(frozen=True)
class CellResult:
    """What one cell gave. found: `Summary.as_dict`. tokens_per_s: None if it was not measured."""

    weights: str
    kv: str
    bits_per_weight: float
    kv_bytes_per_token: float
    tokens_per_s: float | None
    found: Mapping[str, float]

    @property
    def name(self) -> str:
        """Of weights and cache."""
        return f"{self.weights}; KV {self.kv}"

    def as_dict(self) -> dict[str, Any]:
        """All numbers side by side, for JSON and CSV."""
        plain = asdict(self)
        return {**plain, **plain.pop("found")}


class CellStore:
    """A folder with a file for each cell that is done."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def read(self, key: str) -> CellResult | None:
        """The result of a cell; None if there is none, or its file is damaged."""
        try:
            return CellResult(**json.loads(self._path(key).read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def write(self, key: str, result: CellResult) -> None:
        """Keep a result, all of it or nothing."""
        partial = self._path(key).with_suffix(".partial")
        partial.write_text(json.dumps(asdict(result)))
        partial.replace(self._path(key))

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}.json"


def _found(name: str, form: str, error: str = "") -> Callable[[CellResult], str]:
    """A column of a number that was found, with its standard error if `error` is its format."""

    def show(result: CellResult) -> str:
        if name not in result.found:
            return "-"
        text = format(result.found[name], form)
        return f"{text} ± {result.found[f'{name}_error']:{error}}" if error else text

    return show


_COLUMNS: dict[str, Callable[[CellResult], str]] = {
    "weights": lambda r: r.weights,
    "KV cache": lambda r: r.kv,
    "bits/weight": lambda r: f"{r.bits_per_weight:.2f}" if r.bits_per_weight else "-",
    "KV bytes/token": lambda r: f"{r.kv_bytes_per_token:.0f}",
    "perplexity": _found("perplexity", ".3f", ".3f"),
    "ratio": _found("perplexity_ratio", ".4f", ".4f"),
    "mean KL": _found("mean_kl", ".5f", ".5f"),
    "median KL": _found("median_kl", ".5f"),
    "99 % KL": _found("kl_99", ".4f"),
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
    """The same as a list of objects."""
    return json.dumps([result.as_dict() for result in results], indent=1) + "\n"
