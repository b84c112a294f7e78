"""`qoff run`: other programs, which can then load qoff checkpoints through transformers."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from .output import stop_with


class Passing(TyperCommand):
    """A command that takes no option after the program's name: all of them are the program's."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        named = 2 if args[:1] == ["-m"] else 1
        if args and (named == 2 or not args[0].startswith("-")):
            args = [*args[:named], "--", *args[named:]]
        return super().parse_args(ctx, args)


def run(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(help="A Python script unless -m names a module, and its arguments."),
    ] = None,
    module: Annotated[str | None, typer.Option("-m", help="Run this module.")] = None,
) -> None:
    """Run another Python program that can then load qoff checkpoints.

    Programs that never import qoff, like lm_eval, do not know its checkpoints. This imports qoff,
    and then runs the program as `python` would: qoff run -m lm_eval --model hf ...
    """
    given = list(arguments or ())
    if module is not None:
        _run_module(module, given)
    elif given:
        _run_script(Path(given[0]), given[1:])
    else:
        raise typer.BadParameter("name a script, or a module with -m")


def _run_module(name: str, arguments: Sequence[str]) -> None:
    sys.path[0:0] = [str(Path.cwd())]
    try:
        found = find_spec(name)
    except ModuleNotFoundError:  # a package that it would be in
        found = None
    if found is None:
        stop_with(f"there is no module {name!r}; install it into the environment of qoff")
    sys.argv = [name, *arguments]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _run_script(path: Path, arguments: Sequence[str]) -> None:
    if not path.is_file():
        stop_with(f"{path}: there is no such script; name a module with -m")
    sys.path[0:0] = [str(path.resolve().parent)]
    sys.argv = [str(path), *arguments]
    runpy.run_path(str(path), run_name="__main__")
