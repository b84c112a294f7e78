"""Tables as text that other programs read: Markdown and CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]], right: int = 1) -> str:
    """A Markdown table whose columns line up as text, too; the last `right` are right-aligned.

    Rows may be shorter than the header.
    """
    empty = [""] * len(header)
    cells = [
        [" ".join(cell.replace("|", "\\|").split()) for cell in [*row, *empty[len(row) :]]]
        for row in (header, *rows)
    ]
    widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]
    left = len(header) - right
    lines = [
        [cell.ljust(w) if i < left else cell.rjust(w) for i, (cell, w) in enumerate(zipped)]
        for zipped in (list(zip(row, widths, strict=True)) for row in cells)
    ]
    rule = ["-" * w if i < left else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (lines[0], rule, *lines[1:]))


def comma_separated(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """The same as CSV, with quotes where a cell needs them; None and NaN are empty fields."""
    out = io.StringIO()
    known = ([None if cell != cell else cell for cell in row] for row in rows)
    csv.writer(out, lineterminator="\n").writerows([header, *known])
    return out.getvalue().rstrip("\n")
