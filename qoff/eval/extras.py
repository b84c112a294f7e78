"""Libraries that only some evaluations need: the extra `eval`."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from qoff.errors import QoffError


def extra(module: str) -> Any:
    """Import a module of the extra. Raises QoffError, saying what to install, where it is not."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        missing = (error.name or module).partition(".")[0]
        raise QoffError(
            f"this evaluation needs {missing}, which is not installed; pip install 'qoff[eval]'"
        ) from error
