"""Reading the body of a request, within its bounds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from starlette.requests import Request

from qoff.api.errors import ApiError

from .options import ServeOptions

# A body that is this many times too large is not read to its end. Others are: a client that still
# writes would not see the answer.
DISCARDED = 4
KEEP = "qoff.keep"  # key of a scope: what keeps room for the request's body
_UNCOUNTED = 64 << 10  # bytes of each body: nearly all have no more
_LARGEST = 16  # bodies of the largest size that there is room for, beside these


class BodyRoom:
    """Room for the bodies of all requests together. most: bytes of one."""

    def __init__(self, most: int) -> None:
        self._left = _LARGEST * most

    @contextmanager
    def of_one(self) -> Iterator[Callable[[int], bool]]:
        """A function that keeps room for one body of so many bytes, and says whether there is.

        What is kept is given back at the end.
        """
        kept = 0

        def keep(nbytes: int) -> bool:
            nonlocal kept
            more = max(0, nbytes - _UNCOUNTED) - kept
            if more > self._left:
                return False
            self._left -= more
            kept += more
            return True

        try:
            yield keep
        finally:
            keep(0)


async def read_data(request: Request, options: ServeOptions) -> bytes:
    """The whole body. Raises ApiError for one that is too large or slow, or has no room."""
    limit, data = options.max_request_bytes, bytearray()
    total, size = 0, request.headers.get("content-length", "")
    announced = int(size) if size.isdecimal() else 0
    keep: Callable[[int], bool] = request.scope[KEEP]
    kept = announced <= limit
    try:
        async with asyncio.timeout(options.read_timeout_s):
            async for piece in request.stream():
                total += len(piece)
                kept = kept and total <= limit and keep(total)
                if kept:
                    data += piece
                else:
                    data = bytearray()
                    keep(0)
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
    if not kept:
        raise ApiError(
            503,
            "the server has no room for more large requests; try again later",
            code="no_room",
            headers={"Retry-After": "5", "Connection": "close"},
        )
    return bytes(data)


def too_slow() -> ApiError:
    """What a client is told that does not send."""
    return ApiError(408, "the request's body did not come in time", headers={"Connection": "close"})
