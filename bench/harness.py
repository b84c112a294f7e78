"""What every bench does alike: arguments, table, JSON."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
_WIDTH = 170  # columns of a table that goes into a file


@dataclass(frozen=True)
class Bar:
    """A figure that the project wants reached, and what was measured."""

    what: str
    wanted: float
    measured: float

    @property
    def met(self) -> bool:
        return self.measured >= self.wanted

    def line(self) -> str:
        state = "met" if self.met else "NOT MET"
        return f"{state}: {self.what}: {self.measured:.3f}, wanted at least {self.wanted:g}"


@dataclass
class Report:
    """What one run of a bench found. unit: see `BenchResult`."""

    name: str
    settings: dict[str, Any]
    title: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]] = field(default_factory=list)
    measured: dict[str, Any] = field(default_factory=dict)
    ratios: dict[str, Any] = field(default_factory=dict)
    bars: list[Bar] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unit: str = ""

    def publish(self, out: Path | None) -> Path:
        """Print the table and write the JSON, by default into bench/results; returns its path."""
        from rich.console import Console  # `Bar` is for machines without it, too
        from rich.table import Table

        from qoff.measure.results import BenchResult

        table = Table(title=self.title, title_justify="left")
        for i, name in enumerate(self.header):
            table.add_column(name, justify="right" if i else "left", no_wrap=True)
        for row in self.rows:
            table.add_row(*row)
        console = Console()
        if not console.is_terminal:
            console.width = _WIDTH
        console.print(table)
        for line in [*self.notes, *(bar.line() for bar in self.bars)]:
            print(line)
        result = BenchResult(
            self.name,
            self.settings,
            self.measured,
            self.ratios,
            [{**asdict(bar), "met": bar.met} for bar in self.bars],
            self.notes,
            self.unit,
        )
        path = out or RESULTS / f"{result.stem()}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(result.text())
        return path


def out_folder(where: str | Path) -> Path:
    """A folder that --out names, made before anything is measured.

    Raises argparse's error where it cannot be.
    """
    path = Path(where)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{path}: {error.strerror}; name another") from error
    return path


def out_file(text: str) -> Path:
    """A file that --out names, its folder made. Raises as `out_folder`, and for a folder."""
    path = Path(text)
    out_folder(path.parent)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{path}: is a folder; name a file")
    return path


def arguments(
    description: str | None,
    argv: Sequence[str] | None,
    **options: tuple[Callable[[str], Any], Any, str],
) -> argparse.Namespace:
    """Parse --quick, --out and a bench's own options, each (type, default, help)."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small cases, few rounds")
    parser.add_argument("--out", type=out_file, help="JSON file; default in bench/results")
    for name, (kind, default, text) in options.items():
        flag = f"--{name.replace('_', '-')}"
        if kind is bool:
            parser.add_argument(flag, action="store_true", help=text)
        else:
            parser.add_argument(flag, type=kind, default=default, help=text)
    return parser.parse_args(argv)
