"""`qoff bench --compare` and `--history`: tables of results that were kept."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qoff.errors import QoffError
from qoff.measure.compare import TEST, THRESHOLD, Change, compare, differences, samples_of
from qoff.measure.results import processor_of, read_result
from qoff.measure.tables import comma_separated, markdown

from .output import Format, print_json
from .suite import source_tree

_CHANGE = ("figure", "a", "b", "change", "p", "verdict")
_HISTORY = ("date", "bench", "model", "machine", "qoff", "torch", "figures", "file")


def results_folder(given: Path | None) -> Path:
    """The folder of results. Raises QoffError where neither one is given nor there is a default."""
    if given is not None:
        return given
    root = source_tree()
    if root is None:
        raise QoffError("where are the results? this qoff has no source tree; give --results DIR")
    return root / "bench" / "results"


def print_comparison(a: Path, b: Path, percent: float | None, output: Format) -> bool:
    """Print a row for each figure that both files have; whether any became slower.

    percent: medians closer than that have not changed; None: `THRESHOLD`. What else
    differs goes to standard error. Raises FormatError for files that are no results, QoffError
    where nothing is common.
    """
    before, after = read_result(a), read_result(b)
    threshold = THRESHOLD if percent is None else percent / 100
    changes = compare(before, after, threshold)
    differing = differences(before, after)
    for line in differing:
        print(f"differs: {line}", file=sys.stderr)
    rows = [_change(change) for change in changes]
    if output == "json":
        print_json(
            {
                "a": str(a),
                "b": str(b),
                "test": TEST,
                "threshold": threshold,
                "differences": differing,
                "changes": [dict(zip(_CHANGE, row, strict=True)) for row in rows],
            }
        )
    else:
        _print_rows(_CHANGE, rows, output)
    if output == "md":
        print(f"\n{_summary(changes, threshold)}")
    return any(change.verdict == "slower" for change in changes)


def print_history(folder: Path, output: Format) -> None:
    """Print a row for each result in a folder, oldest first; files that are none are named.

    Raises QoffError where there is none.
    """
    rows = []
    for path in folder.glob("*.json"):
        try:
            rows.append(_kept(path))
        except QoffError as error:
            print(f"not listed: {error}", file=sys.stderr)
    if not rows:
        raise QoffError(f"{folder}: no results there; make one: qoff bench MODEL --save")
    rows.sort(key=lambda row: (row[0], row[1], len(row[-1]), row[-1]))  # -2 before -10
    if output == "json":
        print_json([dict(zip(_HISTORY, row, strict=True)) for row in rows])
    else:
        _print_rows(_HISTORY, rows, output)


def _change(change: Change) -> tuple[Any, ...]:
    medians = change.before.median, change.after.median
    return (change.name, *medians, change.relative, change.p, change.verdict)


def _summary(changes: Sequence[Change], threshold: float) -> str:
    counts = Counter(change.verdict for change in changes)
    said = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    return f"{said}. Beyond noise: {TEST}, and medians at least {threshold:.1%} apart."


def _kept(path: Path) -> tuple[Any, ...]:
    """The row of a result. Raises FormatError for a file that is none."""
    found = read_result(path)
    return (
        found.date,
        found.bench,
        str(found.settings.get("model", "-")),
        processor_of(found.machine),
        *(str(found.versions.get(name, "-")) for name in ("qoff", "torch")),
        sum(1 for _ in samples_of(found)),
        path.name,
    )


def _print_rows(header: Sequence[str], rows: Sequence[Sequence[Any]], output: Format) -> None:
    if output == "csv":
        print(comma_separated(header, rows))
        return
    cells = [[_cell(key, value) for key, value in zip(header, row, strict=True)] for row in rows]
    print(markdown(header, cells, right=0))


def _cell(key: str, value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    if key == "change":
        return f"{value:+.1%}"
    return f"{value:.2g}" if key == "p" else f"{value:.4g}"
