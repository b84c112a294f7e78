"""Lines of the log that a process says once."""

from __future__ import annotations

import logging
from functools import cache


@cache
def say_once(logger: logging.Logger, text: str) -> None:
    """Warn with a text, unless this logger has done so."""
    logger.warning("%s", text)
