"""Faults of the server: what clients are told of them, and what its log says."""

from __future__ import annotations

import secrets
from typing import Any

from qoff.api.errors import ApiError, as_api_error


def told(error: BaseException, said: dict[str, Any], prompt: str | None = None) -> ApiError:
    """What a client is told of an exception; of the server's own faults, the request's id alone.

    They may name files of the machine. said: fields of the request's line in the log, which get the
    whole of it. prompt: the field of the request that has the prompt.
    """
    known = as_api_error(error, prompt)
    if known.status != 500:
        return known
    said["error"] = str(error) or type(error).__name__
    if isinstance(error, ApiError):
        return known
    request_id = said.setdefault("id", f"req-{secrets.token_hex(12)}")
    return ApiError(
        500,
        f"the server failed to answer the request; its log says why, under the id {request_id}",
        code="internal_error",
        headers={"X-Request-Id": request_id},
    )
