"""Reading the body of a request, within its bounds."""

from __future__ import annotations

import asyncio

from starlette.requests import Request

from qoff.api.errors import ApiError

from .options import ServeOptions

# A body that is this many times too large is not read to its end. Others are: a client that still
# writes would not see the answer.
DISCARDED = 4


async def read_data(request: Request, options: ServeOptions) -> bytes:
    """The whole body. Raises ApiError for one that is too large or slow."""
    limit, data = options.max_request_bytes, bytearray()
    total, size = 0, request.headers.get("content-length", "")
    announced = int(size) if size.isdecimal() else 0
    try:
        async with asyncio.timeout(options.read_timeout_s):
            async for piece in request.stream():
                total += len(piece)
                data += piece if total <= limit else b""
                if max(total, announced) > DISCARDED * limit:
                    break
    except TimeoutError as error:
        raise too_slow() from error
    if max(total, announced) > limit:
        raise ApiError(
            413,
            f"the request's body has more than {limit} bytes",
            code="request_too_large",
            headers={"Connection": "close"},
        )
    return bytes(data)


def too_slow() -> ApiError:
    """What a client is told that does not send."""
    return ApiError(408, "the request's body did not come in time", headers={"Connection": "close"})
