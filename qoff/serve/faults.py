"""Faults of the server: what clients are told of them, and what its log says."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

from qoff.api.errors import ApiError, as_api_error

from .logs import logger

_WHY = "the server failed to answer; its log says why"


def told(error: BaseException, said: dict[str, Any], prompt: str | None = None) -> ApiError:
    """What a client is told of an exception; of the server's own faults, the request's id alone.

    They may name files of the machine. said: fields of the request's line in the log, which get the
    whole of it. prompt: the field of the request that has the prompt.
    """
    known = as_api_error(error, prompt)
    if known.status != 500:
        return known
    said["error"] = str(error) or type(error).__name__
    request_id = said.setdefault("id", f"req-{secrets.token_hex(12)}")
    why = known.message if isinstance(error, ApiError) else _WHY
    return ApiError(
        500,
        f"{why} (request {request_id})",
        code="internal_error",
        headers={"X-Request-Id": request_id},
    )


def told_of_line(error: Exception, prompt: str | None = None) -> ApiError:
    """What the line of a batch says of an exception; the log has the whole of a fault."""
    known = as_api_error(error, prompt)
    if known.status != 500 or isinstance(error, ApiError):
        return known
    logger.error("line failed", extra={"fields": {"error": str(error) or type(error).__name__}})
    return ApiError(500, _WHY, code="internal_error")


def told_of_batch(error: Exception, folder: Path) -> str:
    """What a client is told of what ended a batch, whose files are in this folder."""
    known = as_api_error(error)
    return _WHY if known.status == 500 else known.message.replace(f"{folder}/", "")
