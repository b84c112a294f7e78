"""Charts of what a bench wrote: `python -m bench.plot FILE.json`, as SVG beside FILE.

bench.offload: FILE, tokens per second of each plan beside what its bytes and computation allow.
bench.gpu: FILE-roofline, operations per second over operations per byte, below the measured limits
of memory and tensor cores; FILE-ratio, time of each peer over ours, by M, a line for the median of
the matrices. Needs matplotlib (the extra `bench`).
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

from qoff.errors import QoffError
from qoff.eval.charts import new_figure, save

_SIZE = (8.0, 5.0)  # inches
_PLANS = (  # of bench.offload that are drawn, the first on top
    "all resident",
    "75% of the weights",
    "50% of the weights",
    "30% of the weights",
    "50%, the rest in host memory",
    "50%, sequential",
    "KV on disk",
)
_MEASURED, _BOUND = "#1f5fa8", "#d9dde3"


def main(argv: Sequence[str] | None = None) -> int:
    """Draw a file; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="JSON that bench.gpu or bench.offload wrote")
    parser.add_argument("--folder", type=Path, help="where the charts go; default beside FILE")
    args = parser.parse_args(argv)
    try:
        found = json.loads(args.file.read_text())
    except (OSError, ValueError) as error:
        print(f"{args.file} cannot be read: {error}", file=sys.stderr)
        return 2
    timed = found.get("ceilings") and found.get("results")
    if found.get("bench") != "offload" and not (found.get("bench") == "gpu" and timed):
        print(
            f"{args.file} holds no times; bench.gpu and bench.offload write such files",
            file=sys.stderr,
        )
        return 2
    try:
        for path in draw(found, args.folder or args.file.parent, args.file.stem):
            print("wrote", path)
    except QoffError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def draw(found: Mapping[str, Any], folder: Path, stem: str) -> list[Path]:
    """Draw a result of either bench; raises QoffError without matplotlib."""
    if found["bench"] == "offload":
        return _offload(found, folder / stem)
    paths = []
    for name, paint in (("roofline", _roofline), ("ratio", _ratio)):
        figure = new_figure(*_SIZE)
        axes = figure.add_subplot()
        axes.set_title(f"{found['gpu']['name']}, {found['date']}")
        if paint(axes, found):
            axes.grid(True, which="both", alpha=0.25)
            paths += save(figure, folder / f"{stem}-{name}", ("svg",))
    return paths


def _offload(found: Mapping[str, Any], path: Path) -> list[Path]:
    """A panel for each model, a bar for each plan."""
    models: dict[str, dict[str, Any]] = defaultdict(dict)
    for label, measured in found["measured"].items():
        model, _, plan = label.partition(": ")
        if plan in _PLANS:
            models[model][plan] = measured
    figure = new_figure(9.5, 0.9 + 2.8 * len(models))
    figure.suptitle(
        "Decode throughput as less of the model fits on the device\n"
        "blue: measured; grey: the most that computing, disk reads or copies alone allow"
    )
    panels = figure.subplots(len(models), 1, squeeze=False)
    for axes, (model, plans) in zip(panels[:, 0], models.items(), strict=True):
        _plans(axes, model, [(plan, plans[plan]) for plan in _PLANS if plan in plans])
    return save(figure, path, ("svg",))


def _plans(axes: Any, model: str, plans: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    rates = [m["tokens_per_round"] / m["seconds"]["median"] for _, m in plans]
    bounds = [m["tokens_per_round"] / m["bound_s"] for _, m in plans]
    places = range(len(plans))
    axes.barh(places, bounds, color=_BOUND)
    axes.barh(places, rates, color=_MEASURED, height=0.55)
    for place, rate, bound in zip(places, rates, bounds, strict=True):
        part = f", {rate / bound:.0%} of the bound" if rate < bound else ""
        text = f" {rate:.0f} tokens/s{part}"
        axes.text(max(rate, bound), place, text, va="center", fontsize="small")
    names = [f"{plan}: {m['device_bytes'] / 2**20:.0f} MiB" for plan, m in plans]
    axes.set_yticks(places, names, fontsize="small")
    axes.invert_yaxis()
    axes.set_xlim(0, 1.4 * max(*rates, *bounds))
    axes.set_xticks([])
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.set_title(model, loc="left", fontweight="bold")


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
