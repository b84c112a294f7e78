"""A table as text, by the standard library alone: the GPU bench runs where little is installed."""

from __future__ import annotations

from collections.abc import Sequence


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """PaddedBatch as wide as their widest cell, the first to the left, the others to the right.

    Rows may be shorter than the header; the last cell of such a row counts for no width.
    """
    widths = [len(name) for name in header]
    for row in rows:
        for i, cell in enumerate(row if len(row) == len(header) else row[:-1]):
            widths[i] = max(widths[i], len(cell))
    lines = [_line(header, widths), _line(["-" * width for width in widths], widths)]
    return "\n".join([*lines, *(_line(row, widths) for row in rows)])


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [
        cell.rjust(width) if i else cell.ljust(width)
        for i, (cell, width) in enumerate(zip(cells, widths, strict=False))
    ]
    return "  ".join(padded).rstrip()
