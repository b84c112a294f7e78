"""Connections of clients that may be slow, silent or one too many, with TLS or without."""

from __future__ import annotations

import asyncio
import socket
import ssl
from contextlib import suppress
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from qoff.api.answers import encoded
from qoff.api.errors import ApiError

from .options import ServeOptions

# A client that sends no more is asked again after the first time, then after twice, up to the last.
_FIRST_PROBE_S, _LAST_PROBE_S = 0.05, 2.0


class Connection(H11Protocol):
    """A connection of a client that may be slow, silent or one too many."""

    def __init__(self, options: ServeOptions, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._options = options
        self._deadline: asyncio.TimerHandle | None = None  # for the head of a request
        self._to_read: asyncio.TimerHandle | None = None  # for the client, what it was sent
        self._probe: asyncio.TimerHandle | None = None  # of a client that sends no more
        self._refused = self._half_closed = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        _bound_silence(transport, self._options.read_timeout_s)
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

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whether the client may still wait for an answer that has not begun, as `nc -N` does.

        It may be gone as well. What is written tells: the system of who is gone refuses it. TLS is
        never closed by half, and HTTP/1.0 has no answers in between.
        """
        if self._half_closed:  # said again where reading was paused
            return True
        one = self.cycle
        if one is None or one.more_body or one.response_started or self._refused:
            return False
        if self.scheme == "https" or one.scope["http_version"] != "1.1":
            return False
        self._half_closed = True
        self._ask_whether_gone(_FIRST_PROBE_S)
        return True

    def _ask_whether_gone(self, again_s: float) -> None:
        """Send what says nothing, and sends on what was refused, until the answer begins."""
        if not self.cycle.response_started and not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            then = min(2 * again_s, _LAST_PROBE_S)
            self._probe = self.loop.call_later(again_s, self._ask_whether_gone, then)

    def _stop_asking(self) -> None:
        if self._probe is not None:
            self._probe.cancel()

    def pause_writing(self) -> None:
        """64 KiB wait for the client, which has to take most of them in time."""
        super().pause_writing()
        self._all_read()
        self._to_read = self.loop.call_later(self._options.read_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._all_read()
        if self._awaits_request:
            self._expect_reading()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._half_closed and self._awaits_request:
            self.transport.close()  # when all is written
        elif self._half_closed:  # the answer to a request behind it
            self._stop_asking()
            self._ask_whether_gone(_FIRST_PROBE_S)
        self._expect_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._all_read()
        self._stop_asking()
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

    def _expect_reading(self) -> None:
        """What is left of an answer has to be taken in time, too."""
        if self._to_read is None and self.transport.get_write_buffer_size():
            late = self._options.read_timeout_s
            self._to_read = self.loop.call_later(late, self._check_read)

    def _check_read(self) -> None:
        self._to_read = None
        if self.transport.get_write_buffer_size():
            self.transport.abort()

    def _all_read(self) -> None:
        if self._to_read is not None:
            self._to_read.cancel()
            self._to_read = None

    def _refuse(self, status: int, message: str, code: str | None = None) -> None:
        """Answer what did not become a request, and close."""
        body = encoded(ApiError(status, message, code=code).body())
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
        self._expect_reading()


class Handshake(asyncio.Protocol):
    """TLS before HTTP: counted from the start, and bounded in time. others: those under way."""

    def __init__(
        self,
        options: ServeOptions,
        context: ssl.SSLContext,
        others: set[Handshake],
        arguments: dict[str, Any],
    ) -> None:
        self._options, self._context, self._others = options, context, others
        self._arguments = arguments  # of the connection
        self._early: list[bytes] = []  # that came with the end of the handshake
        self._lost = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        _bound_silence(transport, self._options.read_timeout_s)
        connections = self._arguments["server_state"].connections
        if len(connections) + len(self._others) >= self._options.max_connections:
            transport.abort()
            return
        self._others.add(self)
        self._task = asyncio.get_running_loop().create_task(self._shake_hands(transport))

    async def _shake_hands(self, transport: asyncio.Transport) -> None:
        secured = None
        try:
            secured = await asyncio.get_running_loop().start_tls(
                transport,
                self,
                self._context,
                server_side=True,
                ssl_handshake_timeout=self._options.read_timeout_s,
            )
        except OSError:  # no TLS, or not in time
            return
        finally:
            self._others.discard(self)
            if secured is None:
                transport.abort()
        if secured is None or self._lost:
            return
        connection = Connection(self._options, **self._arguments)
        secured.set_protocol(connection)
        connection.connection_made(secured)
        for data in self._early:
            connection.data_received(data)

    def data_received(self, data: bytes) -> None:
        self._early.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True


def _bound_silence(transport: asyncio.Transport, seconds: float) -> None:
    """Have the kernel end a connection whose other side acknowledges nothing."""
    with suppress(OSError):  # the connection is gone
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(seconds * 1000))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
