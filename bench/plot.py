"""Draws what `bench.gpu` wrote: `python -m bench.plot FILE.json`.

FILE-roofline: operations per second over operations per byte, below the measured limits of memory
and tensor cores. FILE-ratio: time of each peer over ours, by M, a line for the median of the
matrices. Each as PNG and SVG, beside FILE or in --folder. Needs matplotlib (the extra `bench`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_SIZE = (8.0, 5.0)  # inches
_KINDS = ("png", "svg")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="JSON that bench.gpu wrote")
    parser.add_argument("--folder", type=Path, help="where the pictures go; default beside FILE")
    args = parser.parse_args(argv)
    try:
        found = json.loads(args.file.read_text())
    except (OSError, ValueError) as error:
        print(f"{args.file} cannot be read: {error}", file=sys.stderr)
        return 2
    if found.get("bench") != "gpu" or not found.get("ceilings") or not found.get("results"):
        print(f"{args.file} holds no times; python -m bench.gpu writes such files", file=sys.stderr)
        return 2
    import matplotlib as mpl

    mpl.use("Agg")
    for path in draw(found, args.folder or args.file.parent, args.file.stem):
        print("wrote", path)
    return 0


def draw(found: Mapping[str, Any], folder: Path, stem: str) -> list[Path]:
    """Draw both pictures; the second is left out where no case has a peer and an M."""
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    title = f"{found['machine']['gpu']}, {found['date']}"
    paths = []
    for name, paint in (("roofline", _roofline), ("ratio", _ratio)):
        figure = Figure(figsize=_SIZE, layout="constrained")
        axes = figure.add_subplot()
        axes.set_title(title)
        if not paint(axes, found):
            continue
        axes.grid(True, which="both", alpha=0.25)
        for kind in _KINDS:
            paths.append(folder / f"{stem}-{name}.{kind}")
            figure.savefig(paths[-1])
    return paths


def _roofline(axes: Any, found: Mapping[str, Any]) -> bool:
    ceilings = found["ceilings"]
    bandwidth = max(ceilings["read"], ceilings["copy"])
    points: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for r in found["results"]:
        if r["flops"]:
            points[r["op"]].append((r["flops"] / r["nbytes"], r["flops"] / r["seconds"]))
    if not points:
        return False
    knee = ceilings["fp16"] / bandwidth
    xs = [x for values in points.values() for x, _ in values]
    ends = (min(*xs, knee) / 2, knee, max(*xs, knee) * 2)
    roof = [min(x * bandwidth, ceilings["fp16"]) / 1e12 for x in ends]
    axes.loglog(ends, roof, color="black", label="read bandwidth, cuBLAS fp16")
    for op, values in points.items():
        axes.loglog(
            [x for x, _ in values], [y / 1e12 for _, y in values], "o", alpha=0.6, ms=4, label=op
        )
    axes.set_xlabel("operations per byte")
    axes.set_ylabel("TFLOP/s")
    axes.legend()
    return True


def _ratio(axes: Any, found: Mapping[str, Any]) -> bool:
    ratios: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for r in found["results"]:
        if r["op"] == "w4_linear":
            for peer, seconds in r["peers"].items():
                ratios[peer][r["m"]].append(seconds / r["seconds"])
    for peer, by_m in ratios.items():
        ms = sorted(by_m)
        (line,) = axes.plot(ms, [statistics.median(by_m[m]) for m in ms], "o-", label=peer)
        low, high = ([f(by_m[m]) for m in ms] for f in (min, max))
        axes.fill_between(ms, low, high, color=line.get_color(), alpha=0.12, linewidth=0)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("M, tokens")
    axes.set_ylabel("time of the peer / time of w4_linear")
    if ratios:
        axes.legend()
    return bool(ratios)


if __name__ == "__main__":
    sys.exit(main())
