"""What goes wrong with a request, in the shape that OpenAI's clients read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qoff.errors import ArgumentError, ContextLengthError, QoffError, UnsupportedModelError

_SHOWN = 500  # characters of a message


class ApiError(Exception):
    """An answer with an error. param: the field that is wrong; code: for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message = status, message
        self.param, self.code, self.headers = param, code, dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The JSON document of the answer."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        if self.status >= 500:
            kind = "server_error"
        return {
            "error": {
                "message": self.message[:_SHOWN],
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }


_TYPES = {401: "authentication_error", 429: "rate_limit_error"}


class ClientGone(Exception):  # noqa: N818
    """The client has hung up: there is nobody to answer."""


def as_api_error(error: BaseException, prompt: str | None = None) -> ApiError:
    """What a client is told of an exception; of one that is not ours, nothing.

    prompt: the field of the request that has the prompt.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ContextLengthError):
        return ApiError(400, str(error), param=prompt, code="context_length_exceeded")
    if isinstance(error, ArgumentError | UnsupportedModelError):
        return ApiError(400, str(error))
    if isinstance(error, QoffError):
        return ApiError(500, str(error))
    if isinstance(error, TimeoutError):
        return ApiError(504, "the request took longer than the server allows", code="timeout")
    return ApiError(500, "internal error", code="internal_error")
