"""The server's log: lines of JSON on standard error."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

from huggingface_hub.utils import (
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
)

logger = logging.getLogger("qoff.serve")
_EACH_S = 10.0  # between lines of how far something is


class JsonLines(logging.Formatter):
    """A log record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        said = {"time": when, "level": record.levelname.lower(), "event": record.getMessage()}
        if record.exc_info:
            said["error"] = self.formatException(record.exc_info)
        return json.dumps({**said, **getattr(record, "fields", {})}, default=str)


def _mild(record: logging.LogRecord) -> bool:
    """Have uvicorn warn of requests that a server's end cuts off, where it says error."""
    if "graceful shutdown exceeded" in str(record.msg):
        record.levelno, record.levelname = logging.WARNING, "WARNING"
    return True


@contextmanager
def logging_to_stderr(level: str) -> Iterator[None]:
    """Have what the server, qoff, uvicorn, asyncio and Python's warnings say go to standard error,
    as JSON lines; bars of downloads are not drawn.

    level: the lowest of the server; that of the others is higher.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    handler.addFilter(_mild)
    others = dict.fromkeys(("qoff", "uvicorn.error", "py.warnings"), "WARNING")
    others["asyncio"] = "ERROR"
    least = {name: max(one, level.upper(), key=_number) for name, one in others.items()}
    found = {logging.getLogger(name): one for name, one in least.items()}
    before = {log: (log.level, log.propagate) for log in (*found, logger)}
    logger.setLevel(level.upper())
    for log, lowest in found.items():
        log.addHandler(handler)
        log.propagate = False
        log.setLevel(lowest)
    logging.captureWarnings(True)
    drawn = not are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        logging.captureWarnings(False)
        if drawn:
            enable_progress_bars()
        for log, (lowest_before, propagates) in before.items():
            log.removeHandler(handler)
            log.propagate = propagates
            log.setLevel(lowest_before)


def _number(level: str) -> int:
    return logging.getLevelNamesMapping()[level]


@contextmanager
def logged_progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a function (done, total) that logs how far something is, every ten seconds."""
    started = said = time.monotonic()

    def update(done: int, total: int) -> None:
        nonlocal said
        now = time.monotonic()
        if done < total and now - said > _EACH_S:
            said = now
            left = (said - started) * (total - done) / max(1, done)
            fields = {"done": done, "total": total, "seconds_left": round(left)}
            logger.info(what, extra={"fields": fields})

    yield update
