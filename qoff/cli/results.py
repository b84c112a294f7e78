"""`qoff bench --compare` and `--history`: tables of results that were kept."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qoff.errors import ArgumentError, QoffError
from qoff.measure.compare import TEST, THRESHOLD, compare, differences, samples_of
from qoff.measure.results import UnlikeResultError, processor_of, read_result
from qoff.measure.tables import comma_separated, markdown
from qoff.units import counted

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


def place_for_results(given: Path | None) -> Path:
    """The folder that `--save` writes to; one that is missing is made with the result, no sooner.

    Raises ArgumentError where it cannot be written or made, QoffError as `results_folder` does.
    """
    folder = results_folder(given)
    if folder.exists():
        if not folder.is_dir():
            raise ArgumentError(f"--results {folder}: is no folder; name one")
    elif not folder.parent.is_dir():
        raise ArgumentError(f"--results {folder}: there is no folder {folder.parent}; make it")
    place = folder if folder.exists() else folder.parent
    if not os.access(place, os.W_OK | os.X_OK):
        raise ArgumentError(f"--results {folder}: {place} cannot be written; name another folder")
    return folder


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
    rows = [
        (one.name, one.before.median, one.after.median, one.relative, one.p, one.verdict)
        for one in changes
    ]
    if output == "json":
        asked = {"a": str(a), "b": str(b), "test": TEST, "threshold": threshold}
        print_json({**asked, "differences": differing, "changes": _named(_CHANGE, rows)})
    else:
        _print_rows(_CHANGE, rows, output)
    if output == "md":
        counts = Counter(one.verdict for one in changes)
        said = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
        print(f"\n{said}. Beyond noise: {TEST}, and medians at least {threshold:.1%} apart.")
    return any(one.verdict == "slower" for one in changes)


def print_history(folder: Path, output: Format) -> None:
    """Print a row for each result in a folder, oldest first.

    Of files that are none standard error has the names: in one line those of another form, which
    benches for GPUs, say, have; with what is wrong those that are damaged.

    Raises QoffError where there is none.
    """
    rows: list[tuple[Any, ...]] = []
    unlike: list[str] = []
    for path in folder.glob("*.json"):
        try:
            found = read_result(path)
        except UnlikeResultError:
            unlike.append(path.name)
            continue
        except QoffError as error:
            print(f"not listed: {error}", file=sys.stderr)
            continue
        model, figures = str(found.settings.get("model", "-")), sum(1 for _ in samples_of(found))
        versions = [str(found.versions.get(name, "-")) for name in ("qoff", "torch")]
        machine = processor_of(found.machine)
        rows.append((found.date, found.bench, model, machine, *versions, figures, path.name))
    if unlike:
        print(
            f"not listed: {counted(len(unlike), 'file')} of another form, without samples to "
            f"compare: {', '.join(sorted(unlike))}",
            file=sys.stderr,
        )
    if not rows:
        raise QoffError(f"{folder}: no results there; make one: qoff bench MODEL --save")
    rows.sort(key=lambda row: (row[0], row[1], len(row[-1]), row[-1]))  # -2 before -10
    if output == "json":
        print_json(_named(_HISTORY, rows))
    else:
        _print_rows(_HISTORY, rows, output)


def _named(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(header, row, strict=True)) for row in rows]


def _print_rows(header: Sequence[str], rows: Sequence[Sequence[Any]], output: Format) -> None:
    if output == "csv":
        print(comma_separated(header, rows))
        return
    cells = [[_cell(key, value) for key, value in row.items()] for row in _named(header, rows)]
    print(markdown(header, cells, right=0))


def _cell(key: str, value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    if key == "change":
        return f"{value:+.1%}"
    return f"{value:.2g}" if key == "p" else f"{value:.4g}"
