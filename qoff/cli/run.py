"""`qoff run`: other programs, which can then load qoff checkpoints through transformers."""

from __future__ import annotations

import runpy
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from .output import stop_with

_MODELS = "; models answer in qoff generate, qoff chat and qoff serve"


class Passing(TyperCommand):
    """A command that takes no option after the program's name: all of them are the program's."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        named = 2 if args[:1] == ["-m"] else 1
        if args and args != ["-m"] and (named == 2 or not args[0].startswith("-")):
            args = [*args[:named], "--", *args[named:]]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the program. An error that Typer takes for its own ends it with a traceback."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # who reads has seen enough
            raise
        except (OSError, EOFError) as error:
            sys.excepthook(type(error), error, error.__traceback__)
            raise SystemExit(1) from None


def run(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(help="A Python script (without -m) and its arguments."),
    ] = None,
    module: Annotated[str | None, typer.Option("-m", help="Run this module.")] = None,
) -> None:
    """Run another Python program so that it can load qoff checkpoints.

    Programs like lm_eval do not import qoff, so they do not know its checkpoints. This imports qoff
    and then runs the program as `python` would: qoff run -m lm_eval --model hf ...
    """
    given = list(arguments or ())
    if module is None and not given:
        raise typer.BadParameter("name a script, or a module with -m")
    if module is not None:
        sys.path[0:0] = [str(Path.cwd())]
        if not _exists(module):
            stop_with(f"there is no module {module!r}; install it into the environment of qoff")
        sys.argv = [module, *given]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        return
    path = Path(given[0])
    if not path.is_file():
        stop_with(f"{path}: there is no such script; name a module with -m{_MODELS}")
    with path.open("rb") as file:
        if b"\0" in file.read(1024):
            stop_with(f"{path} is no Python script{_MODELS}")
    sys.path[0:0] = [str(path.resolve().parent)]
    sys.argv = given
    runpy.run_path(str(path), run_name="__main__")


def _exists(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # a package that it would be in
        return False
