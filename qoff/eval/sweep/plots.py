"""Charts of a sweep: what is lost against what is saved."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from qoff.eval.charts import new_figure, save

from .cells import CellResult

_SIZE = (8.0, 5.0)  # inches
_LABELS = {"perplexity": "perplexity", "mean_kl": "mean KL from the reference, nats"}
Point = tuple[float, float]


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
