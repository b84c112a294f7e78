"""Libraries that only some evaluations need: the extra `eval`."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from io import StringIO
from typing import Any

from qoff.errors import QoffError

_EACH_S = 10.0  # a line, where there is no terminal


def extra(module: str) -> Any:
    """Import a module of the extra. Raises QoffError, saying what to install, if it is missing."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        missing = (error.name or module).partition(".")[0]
        raise QoffError(
            f"this evaluation needs {missing}, which is not installed; pip install 'qoff[eval]'"
        ) from error


@contextmanager
def errors_only(logger: str) -> Iterator[None]:
    """Keep a library's logger from warning of what is meant to be so."""
    found = logging.getLogger(logger)
    level = found.level
    found.setLevel(logging.ERROR)
    try:
        yield
    finally:
        found.setLevel(level)


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Let a library's own module or class have another value meanwhile."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


_UP = "\x1b[A"  # a line up, from a bar to one above it


class _Lines(StringIO):
    """What tqdm writes a bar to, without what makes it stay in its place."""

    def write(self, text: str) -> int:
        if line := text.replace(_UP, "").strip():
            print(line, file=sys.stderr, flush=True)
        return len(text)


@contextmanager
def lines_for_bars() -> Iterator[None]:
    """Where standard error is no terminal, let bars of tqdm be a line every ten seconds."""
    if sys.stderr.isatty():
        yield
        return
    bars = extra("tqdm.std").tqdm
    begin = bars.__init__
    form = "{desc}: {n_fmt} of {total_fmt}, {remaining} left"
    fixed = {"file": _Lines(), "bar_format": form, "leave": False, "ncols": None}
    fixed |= dict.fromkeys(("delay", "mininterval", "maxinterval"), _EACH_S)

    def as_lines(bar: Any, *args: Any, **options: Any) -> None:
        begin(bar, *args, **{"desc": "reading", **options, **fixed})

    with replaced(bars, "__init__", as_lines):
        yield
