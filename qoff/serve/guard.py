"""Around the application: who may ask, one line of log for a request, no traceback to anyone."""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import time
import traceback
from collections.abc import Sequence
from typing import Any
from urllib.parse import unquote, urlsplit

from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qoff.api.answers import DONE, event
from qoff.api.errors import ApiError, ClientGone

from .bodies import KEEP, BodyRoom
from .faults import told
from .generation import LOG
from .logs import logger

_OPEN = frozenset({"/", "/health", "/metrics"})  # without a key
_ABSOLUTE = re.compile(rb"https?://([^/]+)(/.*)?", re.IGNORECASE)  # without what is behind a "?"
_GONE = 499  # nginx's status for clients that hang up


class Guard:
    """Checks the key and the origin of a request, and has its end logged, whatever it is.

    room: for bodies; a request's is given back at its end.
    """

    def __init__(
        self, app: ASGIApp, api_keys: Sequence[str], origins: Sequence[str], room: BodyRoom
    ) -> None:
        self._app, self._keys = app, [key.encode() for key in api_keys]
        self._origins, self._room = origins, room

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        start, status, is_open = time.perf_counter(), 0, False  # a stream without its end
        _read_target(scope)
        said: dict[str, Any] = scope.setdefault(LOG, {})

        async def noted(message: Message) -> None:
            nonlocal status, is_open
            if message["type"] == "http.response.start":
                status = message["status"]
                is_open = any(value.startswith(b"text/event-stream")
                              for _, value in message["headers"])  # fmt: skip
            is_open = is_open and message.get("more_body", True)
            await send(message)

        try:
            self._check_origin(scope)
            self._check_key(scope)
            _check_encoding(scope)
            with self._room.of_one() as scope[KEEP]:
                await self._app(scope, receive, noted)
        except (ClientGone, ClientDisconnect):
            status = _GONE
        except asyncio.CancelledError:  # the server ends, and this has had its time
            known = ApiError(503, "the server is stopping", code="stopping")
            if is_open:
                await send({"type": "http.response.body", "body": event(known.body()) + DONE})
            elif not status:
                await JSONResponse(known.body(), known.status)(scope, receive, send)
            status = known.status
        except Exception as error:
            known = told(error, said)
            if known.status == 500:
                said["error"] = "".join(traceback.format_exception(error))
            if not status:
                await JSONResponse(known.body(), known.status, known.headers)(scope, receive, noted)
        finally:
            level = logging.ERROR if status >= 500 and status != 503 else logging.INFO
            if scope["path"] == "/stats" and status == 200:
                level = logging.DEBUG  # each page asks every second
            fields = {
                "method": scope["method"],
                "path": scope["path"][:200],
                "status": status,
                "seconds": round(time.perf_counter() - start, 4),
                "client": (scope.get("client") or ("",))[0],
            }
            logger.log(level, "request", extra={"fields": {**fields, **said}})

    def _check_origin(self, scope: Scope) -> None:
        """Refuse what a page of another origin has a browser send, which asks nobody for a form."""
        headers = dict(scope["headers"])
        origin = headers.get(b"origin", b"").decode("latin-1")
        if not origin or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            return
        own = urlsplit(origin).netloc == headers.get(b"host", b"").decode("latin-1")
        if not own and not {origin, "*"} & set(self._origins):
            raise ApiError(403, "pages of this origin may not ask; see --cors-origin",
                           code="origin_not_allowed")  # fmt: skip

    def _check_key(self, scope: Scope) -> None:
        if not self._keys or scope["path"] in _OPEN:
            return
        headers = dict(scope["headers"])
        kind, _, given = headers.get(b"authorization", b"").partition(b" ")
        right = [hmac.compare_digest(given.strip(), key) for key in self._keys]
        if kind.lower() != b"bearer" or not any(right):
            raise ApiError(401, "wrong or missing API key", code="invalid_api_key",
                           headers={"WWW-Authenticate": "Bearer"})  # fmt: skip


def _check_encoding(scope: Scope) -> None:
    """Refuse a compressed body: a few bytes of one may be gigabytes."""
    found = dict(scope["headers"]).get(b"content-encoding", b"").decode("latin-1")
    if found.strip().lower() not in ("", "identity"):
        raise ApiError(
            415,
            f"the request's body has the Content-Encoding {found[:40]!r}; send it as it is",
            code="unsupported_content_encoding",
            headers={"Accept-Encoding": "identity"},
        )


def _read_target(scope: Scope) -> None:
    """Take a target like `http://host/path`, which proxies send, apart; its host replaces `Host`.

    RFC 9112, 3.2.2. A slash at the end is left out.
    """
    target = _ABSOLUTE.fullmatch(scope["raw_path"])
    if target is not None:
        host, path = target.groups()
        scope["raw_path"] = path or b"/"
        scope["path"] = unquote(scope["raw_path"].decode("ascii"))
        others = [pair for pair in scope["headers"] if pair[0] != b"host"]
        scope["headers"] = [(b"host", host), *others]
    # A redirect would leave out the prefix and the scheme of a proxy.
    scope["path"] = scope["path"].rstrip("/") or "/"
