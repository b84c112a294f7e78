"""What the commands print: tables for people, JSON for machines, one line for an error."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from qoff.interrupts import whole
from qoff.schema import json_text
from qoff.standard_output import write_out

from .progress import duration

_EACH_S = 10.0  # a line, where there is no terminal
_PERIOD_S = 3600.0  # of which a bar takes the rate: a layer may take minutes
Format = Literal["md", "csv", "json"]  # of tables for other programs


def print_error(message: str) -> None:
    """Print a message as one line on standard error."""
    print("qoff:", " ".join(message.splitlines()), file=sys.stderr)


def stop_with(message: str, status: int = 1) -> NoReturn:
    """Print a message as one line on standard error and end the command with a status."""
    print_error(message)
    raise typer.Exit(status) from None


def print_line(text: str) -> None:
    """Print text on standard output, all of it even if a signal comes meanwhile."""
    with whole():
        encoding = sys.stdout.encoding or "utf-8"
        write_out(f"{text}\n".encode(encoding, "replace"), encoding)


def print_json(value: Any) -> None:
    """Print one JSON document on standard output; null for a number that is not finite."""
    print_line(json_text(value, indent=2))


def print_table(
    title: str,
    rows: Sequence[tuple[str, ...]],
    header: tuple[str, ...] = (),
    stderr: bool = False,
) -> None:
    """Print rows of text whose first column is a label; nothing if there are no rows."""
    if not rows:
        return
    table = Table(title=title, title_justify="left", show_header=bool(header))
    for i in range(len(rows[0])):
        table.add_column(header[i] if header else "", justify="left" if i == 0 else "right")
    for row in rows:
        table.add_row(*map(escape, row))
    Console(stderr=stderr).print(table)


@contextmanager
def progress_bar(what: str, quiet: bool = False) -> Iterator[Callable[[int, int], None]]:
    """Yield a function (done, total) that draws a bar on standard error if that is a terminal.

    Elsewhere it writes a line now and then, so that logs say how long it will take.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:.0f} %"),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    bar = Progress(
        *columns,
        console=console,
        disable=quiet or not console.is_terminal,
        speed_estimate_period=_PERIOD_S,
    )
    task = bar.add_task(what)
    started = said = time.monotonic()

    def update(done: int, total: int) -> None:
        nonlocal said
        if not bar.disable:
            bar.start()
            bar.update(task, completed=done, total=total)
        elif not quiet and done < total and time.monotonic() - said > _EACH_S:
            said = time.monotonic()
            left = duration((said - started) * (total - done) / max(1, done))
            print(f"{what}: {done} of {total}, {left} left", file=sys.stderr, flush=True)

    try:
        yield update
    finally:
        if bar.live.is_started:
            bar.stop()
