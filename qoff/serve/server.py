"""uvicorn in a thread, and a model behind it."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from typing import Any, Self

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from qoff.engine import LLM
from qoff.errors import QoffError
from qoff.interrupts import whole

from .answers import encoded
from .app import build_app
from .engine import Engine
from .errors import ApiError
from .options import ServeOptions

logger = logging.getLogger("qoff.serve")
_OTHER_FILES = 256  # that the model and its tiers may have open


class Server:
    """Listens from `__enter__` to `close`. engine: what it answers with; port: where it listens.

    Raises OSError where it cannot listen, QoffError for TLS files that cannot be used.
    """

    def __init__(self, engine: Engine, options: ServeOptions) -> None:
        try:
            config = _config(engine, options)
        except (OSError, ValueError) as error:
            raise QoffError(f"the TLS files cannot be used: {error}") from error
        family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
        self._socket = socket.create_server((options.host, options.port), family=family)
        self.port: int = self._socket.getsockname()[1]
        self._server = _Uvicorn(config)
        self._thread = threading.Thread(target=self._run, name="qoff-serve-http")

    @property
    def connections(self) -> int:
        """Open ones."""
        return len(self._server.server_state.connections)

    def _run(self) -> None:
        self._server.run(sockets=[self._socket])

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def close(self) -> None:
        """Take no more requests; those that are being answered are cancelled after a while."""
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()

    def __exit__(self, *exception: object) -> None:
        self.close()


def serve(open_llm: Callable[[], LLM], engine: Engine, options: ServeOptions) -> None:
    """Load a model and answer requests, until a signal or an error ends it.

    Raises what loading does, and what ends the engine.
    """
    _allow_files(options.max_connections + _OTHER_FILES)
    server = Server(engine, options)
    server.__enter__()
    try:
        scheme = "http" if options.tls_certificate is None else "https"
        fields = {"url": f"{scheme}://{options.host}:{server.port}", "model": engine.name}
        logger.info("loading", extra={"fields": fields})
        engine.start(open_llm())
        logger.info("ready", extra={"fields": fields})
        engine.ended.wait()
        assert engine.failure is not None
        raise engine.failure
    finally:
        with whole():
            logger.info("stopping", extra={"fields": {"in_flight": engine.in_flight}})
            server.close()
            engine.stop()


def _allow_files(wanted: int) -> None:
    """Raise this process's own limit of open files. Raises QoffError where it may not be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise QoffError(
            f"so many connections need {wanted} open files, and the limit is {hard}; "
            "lower --max-connections, or raise the limit (ulimit -Hn)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _config(engine: Engine, options: ServeOptions) -> uvicorn.Config:
    def protocol(**arguments: Any) -> _Connection:
        return _Connection(options, **arguments)

    config = uvicorn.Config(
        build_app(engine, options),
        http=protocol,  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        loop="asyncio",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=int(options.read_timeout_s) or 1,
        timeout_graceful_shutdown=options.shutdown_timeout_s,  # type: ignore[arg-type]
        ssl_certfile=options.tls_certificate,
        ssl_keyfile=options.tls_key,
    )
    config.load()
    return config


class _Uvicorn(uvicorn.Server):
    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        for connection in list(self.server_state.connections):
            connection.transport.abort()  # it has had its time
        await asyncio.sleep(0)


class _Connection(H11Protocol):
    """A connection of a client that may be slow, silent or one too many."""

    def __init__(self, options: ServeOptions, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._options = options
        self._deadline: asyncio.TimerHandle | None = None  # for the head of a request
        self._refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        sock = transport.get_extra_info("socket")
        with suppress(OSError):  # the connection is gone
            late = int(self._options.read_timeout_s * 1000)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, late)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if len(self.connections) > self._options.max_connections:
            self._refused = True
            self._refuse(503, "the server has too many connections", code="too_many_connections")
            return
        self._expect_request()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        super().data_received(data)
        if self._awaits_request:
            if self._deadline is None:
                self._expect_request()
        else:
            self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        self._refused = True
        self._refuse(400, "this is not HTTP")

    @property
    def _awaits_request(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _expect_request(self) -> None:
        late = self._options.read_timeout_s
        self._deadline = self.loop.call_later(late, self._give_up)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self) -> None:
        self._deadline = None
        if self._awaits_request:
            self._refuse(408, "no request came in time")

    def _refuse(self, status: int, message: str, code: str | None = None) -> None:
        """Answer what did not become a request, and close."""
        body = encoded(ApiError(status, message, code=code).body())
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
