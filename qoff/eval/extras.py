"""Libraries that only some evaluations need: the extra `eval`."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from qoff.errors import QoffError


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
