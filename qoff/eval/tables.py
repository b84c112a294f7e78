"""Results of cells as Markdown, CSV and JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict

from .cells import CellResult

_Column = tuple[str, Callable[[CellResult], str]]


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _with_error(value: float | None, error: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f} ± {_number(error, digits)}"


_COLUMNS: tuple[_Column, ...] = (
    ("weights", lambda r: r.weights),
    ("KV cache", lambda r: r.kv),
    ("bits/weight", lambda r: _number(r.bits_per_weight or None, 2)),
    ("KV bytes/token", lambda r: f"{r.kv_bytes_per_token:.0f}"),
    ("perplexity", lambda r: _with_error(r.perplexity, r.perplexity_error, 3)),
    ("ratio", lambda r: _with_error(r.perplexity_ratio, r.perplexity_ratio_error, 4)),
    ("mean KL", lambda r: _with_error(r.mean_kl, r.mean_kl_error, 5)),
    ("median KL", lambda r: _number(r.median_kl, 5)),
    ("99 % KL", lambda r: _number(r.kl_99, 4)),
    ("same top", lambda r: "-" if r.same_top is None else f"{r.same_top:.2%}"),
    ("tok/s", lambda r: _number(r.tokens_per_s, 1)),
)


def header() -> tuple[str, ...]:
    """Names of the columns."""
    return tuple(name for name, _ in _COLUMNS)


def rows(results: Sequence[CellResult]) -> list[tuple[str, ...]]:
    """A row of text for each cell."""
    return [tuple(show(result) for _, show in _COLUMNS) for result in results]


def markdown(results: Sequence[CellResult]) -> str:
    """A table for a document."""
    lines = [header(), tuple("---" for _ in _COLUMNS), *rows(results)]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def as_csv(results: Sequence[CellResult]) -> str:
    """All numbers in full, without what belongs to plots."""
    out = io.StringIO()
    plain = [
        {k: v for k, v in asdict(r).items() if k not in ("layer_errors", "kl_by_place")}
        for r in results
    ]
    writer = csv.DictWriter(out, fieldnames=list(plain[0]))
    writer.writeheader()
    writer.writerows(plain)
    return out.getvalue()


def as_json(results: Sequence[CellResult]) -> str:
    """Everything."""
    return json.dumps([asdict(result) for result in results], indent=1) + "\n"
