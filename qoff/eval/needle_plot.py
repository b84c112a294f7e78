"""Heat maps of a needle test. Needs matplotlib (the extra `eval`)."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

from .extras import extra
from .needle_result import NeedleResult

_KINDS = ("png", "svg")
_CELL = (0.75, 0.6)  # inches
_MARGIN = (1.4, 1.3)


def plot(result: NeedleResult, path: str | PathLike[str]) -> list[Path]:
    """Draw what was retrieved and how likely the keys were, length by depth, for each cache.

    path: without its ending, to which .png and .svg are added. Returns both paths. Raises QoffError
    where matplotlib is missing.
    """
    figures = extra("matplotlib.figure")
    rows, columns = len(result.lengths), len(result.depths)
    width = len(result.caches) * (columns * _CELL[0] + _MARGIN[0])
    height = 2 * (rows * _CELL[1] + _MARGIN[1])
    figure = figures.Figure(figsize=(width + 1, height), layout="constrained")
    axes = figure.subplots(2, len(result.caches), squeeze=False)
    scores = [result.log_probabilities(cache) for cache in result.caches]
    lowest = min(value for table in scores for row in table for value in row)
    for column, cache in enumerate(result.caches):
        _heat(axes[0][column], result, result.retrieved(cache), (0.0, 1.0), "{:.0%}")
        _heat(axes[1][column], result, scores[column], (lowest, 0.0), "{:.1f}")
        axes[0][column].set_title(cache)
    axes[0][0].set_ylabel("tokens (keys retrieved)")
    axes[1][0].set_ylabel("tokens (log-probability)")
    base = Path(path)
    base = base.with_suffix("") if base.suffix[1:] in _KINDS else base
    base.parent.mkdir(parents=True, exist_ok=True)
    paths = [base.with_name(f"{base.name}.{kind}") for kind in _KINDS]
    for target in paths:
        figure.savefig(target)
    return paths


def _heat(
    axes: Any,
    result: NeedleResult,
    table: list[list[float]],
    limits: tuple[float, float],
    form: str,
) -> None:
    """One table [length][depth] as colours with numbers."""
    low, high = limits
    axes.imshow(table, aspect="auto", cmap="RdYlGn", alpha=0.75, vmin=low, vmax=high)
    axes.set_xticks(range(len(result.depths)), [f"{depth:.0%}" for depth in result.depths])
    axes.set_yticks(range(len(result.lengths)), [str(length) for length in result.lengths])
    axes.set_xlabel("depth")
    for y, row in enumerate(table):
        for x, value in enumerate(row):
            axes.text(x, y, form.format(value), ha="center", va="center", fontsize="small")
