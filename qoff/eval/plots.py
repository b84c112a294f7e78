"""Plots of a sweep, each as PNG and SVG. They need matplotlib (the extra `eval`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .cells import CellResult
from .extras import extra

_SIZE = (8.0, 5.0)  # inches
_KINDS = ("png", "svg")
_LINES = 10  # in one picture, at most
Point = tuple[float, float, str]


def pareto(points: Sequence[Point]) -> list[Point]:
    """Those that no other beats: none has less of both, or less of one and as much of the other."""
    best, lowest = [], float("inf")
    for point in sorted(points):
        if point[1] < lowest:
            best.append(point)
            lowest = point[1]
    return best


def draw(results: Sequence[CellResult], folder: Path) -> list[Path]:
    """Draw what the results hold: perplexity and KL against sizes, errors by layer and by place.

    Raises QoffError without matplotlib.
    """
    figures = extra("matplotlib.figure")
    folder.mkdir(parents=True, exist_ok=True)
    pictures: dict[str, Callable[[Any], bool]] = {
        "perplexity": lambda axes: _sizes(axes, results, "perplexity", "perplexity"),
        "kl": lambda axes: _sizes(axes, results, "mean_kl", "mean KL from the reference, nats"),
        "layers": lambda axes: _layers(axes, results),
        "places": lambda axes: _places(axes, results),
    }
    paths = []
    for name, paint in pictures.items():
        figure = figures.Figure(figsize=_SIZE, layout="constrained")
        axes = figure.add_subplot()
        if not paint(axes):
            continue
        axes.grid(True, which="both", alpha=0.25)
        for kind in _KINDS:
            paths.append(folder / f"{name}.{kind}")
            figure.savefig(paths[-1], dpi=150)
    return paths


def _sizes(axes: Any, results: Sequence[CellResult], what: str, label: str) -> bool:
    """One number against bits per weight, or bytes of the cache where only that differs."""
    by_weights = len({r.bits_per_weight for r in results}) > 1
    points = [
        (r.bits_per_weight if by_weights else r.kv_bytes_per_token, float(getattr(r, what)), r.name)
        for r in results
        if getattr(r, what) is not None
    ]
    if len(points) < 2:
        return False
    caches = list(dict.fromkeys(r.kv if by_weights else r.weights for r in results))
    for cache in caches:
        mine = [p for p in points if p[2].endswith(cache) or p[2].startswith(cache)]
        axes.scatter([p[0] for p in mine], [p[1] for p in mine], label=cache, s=24)
    front = pareto(points)
    axes.plot(
        [p[0] for p in front], [p[1] for p in front], "k--", linewidth=1, label="Pareto front"
    )
    if what == "mean_kl" and min(p[1] for p in points) > 0:
        axes.set_yscale("log")
    axes.set_xlabel("bits per weight" if by_weights else "KV bytes per token")
    axes.set_ylabel(label)
    axes.legend(fontsize="small")
    return True


def _layers(axes: Any, results: Sequence[CellResult]) -> bool:
    """Relative error of the hidden states after each layer."""
    shown = [r for r in results if r.layer_errors][:_LINES]
    for result in shown:
        axes.plot(range(len(result.layer_errors)), result.layer_errors, label=result.name)
    axes.set_xlabel("layer")
    axes.set_ylabel("relative error of hidden states")
    if shown:
        axes.legend(fontsize="x-small")
    return bool(shown)


def _places(axes: Any, results: Sequence[CellResult]) -> bool:
    """Mean divergence by the place in the window."""
    shown = [r for r in results if r.kl_by_place][:_LINES]
    for result in shown:
        axes.plot(*zip(*result.kl_by_place, strict=True), label=result.name)
    axes.set_xlabel("place in the window, tokens")
    axes.set_ylabel("mean KL from the reference, nats")
    if shown:
        axes.legend(fontsize="x-small")
    return bool(shown)
