"""The options that the benches of a lent GPU share: where to write, how long, how to go on."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path


def parser_of(module: str, description: str | None, minutes: float) -> argparse.ArgumentParser:
    """A parser of `python -m module`, which takes so many minutes by default."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, help="folder to write to")
    parser.add_argument("--resume", type=Path, help="folder of a run to go on with")
    parser.add_argument("--minutes", type=float, default=minutes, help="how long to take, at most")
    return parser


def parsed(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments; there is a folder among them."""
    args = parser.parse_args(argv)
    if not (args.out or args.resume):
        parser.error("--out or --resume is needed")
    return args
