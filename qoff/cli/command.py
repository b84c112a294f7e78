"""Commands: functions that Typer calls, whose errors become one line, and the program they make."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from io import BufferedWriter, FileIO, TextIOWrapper
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from typer import Context
from typer.core import TyperGroup

from qoff.errors import ArgumentError, QoffError
from qoff.interrupts import ending_by_signals
from qoff.system_memory import address_space, refusals
from qoff.units import format_size

from .output import print_error, stop_with

_Found = TypeVar("_Found")
_LIBRARIES = 5 << 28  # bytes of address space, at least, with the first jobs of a model


class Program(TyperGroup):
    """All commands; standard output that cannot be written is one line and exit status 1, too."""

    def main(self, *args: Any, **options: Any) -> Any:
        """Run the command line as Typer does, and write the rest of standard output."""
        end: SystemExit | None = None
        _open_closed_streams()
        _name_standard_output()
        asked = {"--help", "--version"} & set(sys.argv) or "_QOFF_COMPLETE" in os.environ
        if not asked:
            _check_address_space()
        try:
            try:
                return super().main(*args, **options)
            except SystemExit as error:
                end = error
            sys.stdout.flush()
        except OSError as error:  # of the help, the version, or of what is still buffered
            sys.stdout = None  # Python would try again at its end
            if end is not None and end.code:  # why is said
                raise end from None
            if not isinstance(error, BrokenPipeError):
                print_error(_words(error))
            raise SystemExit(1) from None
        raise end


def _check_address_space() -> None:
    """End the program where its libraries would have no room: they fail in many ways, or abort."""
    limit = address_space()
    if limit is not None and limit < _LIBRARIES:
        print_error(
            f"the limit of address space (ulimit -v) is {format_size(limit)}, and torch and the "
            f"other libraries take {format_size(_LIBRARIES)}; raise the limit"
        )
        raise SystemExit(1)


def _open_closed_streams() -> None:
    """Let standard streams that the process began without be /dev/null.

    Their numbers would be given to files, into which libraries that print would write.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115


class _StandardOutput(FileIO):
    """Standard output, by whose name errors say that it cannot be written."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            error.filename = "standard output"
            raise


def _name_standard_output() -> None:
    """Have errors of writing there name it; not where something else has taken its place."""
    now = sys.stdout
    if now is sys.__stdout__ and isinstance(now, TextIOWrapper):
        now.flush()
        raw, at_once = _StandardOutput(now.fileno(), "w", closefd=False), now.write_through
        sys.stdout = TextIOWrapper(
            raw if at_once else BufferedWriter(raw),  # as Python does
            now.encoding,
            now.errors,
            line_buffering=now.line_buffering,
            write_through=at_once,
        )


class Checked(ABC):
    """A group of options with something to be checked before the command is run."""

    @abstractmethod
    def check(self, context: Context) -> None:
        """Raise a QoffError for what the command line may not have."""


def command(run: Callable[..., None]) -> Callable[..., None]:
    """What Typer is to call: errors become one line on standard error, and exit status 1.

    A parameter whose type is a dataclass stands for an option for each of its fields.
    """
    parameters: list[inspect.Parameter] = []
    groups: dict[str, type] = {}
    called = ""  # the parameter of Typer's context
    for name, parameter in inspect.signature(run, eval_str=True).parameters.items():
        kind = parameter.annotation
        if kind is Context:
            called = name
        if not is_dataclass(kind):
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        groups[name] = kind  # type: ignore[assignment]  # not an instance
        hints = get_type_hints(kind, include_extras=True)
        parameters += [
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=field.default,
                annotation=hints[field.name],
            )
            for field in fields(kind)
        ]
    if not called:
        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter("_called", keyword, annotation=Context))

    @functools.wraps(run)
    def wrapped(**given: Any) -> None:
        context: Context = given[called] if called else given.pop("_called")
        if isinstance(sys.stdout, TextIOWrapper):  # answers may have what its encoding has not
            sys.stdout.reconfigure(errors="replace")
        try:
            for name, kind in groups.items():
                one = kind(**{field.name: given.pop(field.name) for field in fields(kind)})
                if isinstance(one, Checked):
                    one.check(context)
                given[name] = one
            with ending_by_signals(), refusals():
                run(**given)
        except BrokenPipeError:  # who reads has seen enough: typer ends without a word
            raise
        except (QoffError, OSError) as error:
            stop_with(_words(error))
        except KeyboardInterrupt as error:
            stop_with(str(error) or "interrupted", 130)

    wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {one.name: one.annotation for one in parameters}
    return wrapped


def parsed(option: str, parse: Callable[[str], _Found], text: str) -> _Found:
    """What a text means. Raises ArgumentError that names the option."""
    try:
        return parse(text)
    except QoffError as error:
        raise ArgumentError(f"{option}: {error}") from error


def named(context: Context, names: Iterable[str]) -> dict[str, str]:
    """Of these parameters those that the command line has, with their options."""
    options = {p.name: p.opts[0] for p in context.command.params if p.name is not None}
    sources = {name: context.get_parameter_source(name) for name in options.keys() & set(names)}
    found = [name for name, source in sources.items() if source and source.name == "COMMANDLINE"]
    return {name: options[name] for name in sorted(found)}


def _words(error: QoffError | OSError) -> str:
    """What an error says, without the system's number of it."""
    if isinstance(error, QoffError) or not error.strerror:
        return str(error)
    place = "" if error.filename is None else f"{error.filename}: "
    return f"{place}{error.strerror}"
