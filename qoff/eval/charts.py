"""Charts by matplotlib, which the extras `eval` and `bench` install."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qoff.errors import DiskWriteError, io_errors

from .extras import extra

KINDS = ("png", "svg")


def new_figure(width: float, height: float) -> Any:
    """An empty figure, inches. Raises QoffError without matplotlib."""
    return extra("matplotlib.figure").Figure(figsize=(width, height), layout="constrained")


def save(figure: Any, path: Path, kinds: Sequence[str] = KINDS) -> list[Path]:
    """Write a figure as `path` with .png and .svg added to its name; returns the files.

    Raises DiskWriteError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    files = [path.with_name(f"{path.name}.{kind}") for kind in kinds]
    with extra("matplotlib").rc_context({"svg.hashsalt": "qoff", "svg.fonttype": "none"}):
        for file in files:
            # Without the date: the same numbers give the same file.
            metadata = {"Date": None} if file.suffix == ".svg" else None
            with io_errors(file, DiskWriteError):
                figure.savefig(file, metadata=metadata)
    return files
