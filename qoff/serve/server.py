"""uvicorn in a thread, and a model behind it."""

from __future__ import annotations

import asyncio
import errno
import re
import resource
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import uvicorn

from qoff.engine import LLM
from qoff.errors import QoffError
from qoff.interrupts import whole

from .app import build_app
from .connection import Connection, Handshake
from .engine import Engine
from .logs import logger
from .options import ServeOptions

_ENCRYPTED = re.compile(
    rb"^(-----BEGIN ENCRYPTED PRIVATE KEY-----|Proc-Type: 4,ENCRYPTED)", re.MULTILINE
)  # of a key in PEM
_LAST_S = 1.0  # for the end of requests that were cut off
_OTHER_FILES = 256  # that the model and its tiers may have open


class Server:
    """Listens from `__enter__` to `close`. engine: what it answers with; port: where it listens.

    Warns of a certificate that has expired. Raises OSError where it cannot listen, QoffError for
    TLS files that cannot be used.
    """

    def __init__(self, engine: Engine, options: ServeOptions) -> None:
        locked = _is_encrypted(options.tls_key)
        if locked and not sys.stdin.isatty():  # OpenSSL would ask on a terminal
            raise QoffError(_locked_key(options))
        try:
            config = _config(engine, options)
        except (OSError, ValueError) as error:
            said = _locked_key(options) if locked else _unusable(options, error)
            raise QoffError(said) from error
        _warn_if_expired(options.tls_certificate)
        try:
            family, address = _address(options.host, options.port)
            self._socket = socket.create_server(address, family=family)
        except (OSError, UnicodeError) as error:
            raise OSError(_not_listening(options, error)) from error
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
        host = f"[{options.host}]" if ":" in options.host else options.host
        fields = {"url": f"{scheme}://{host}:{server.port}", "model": engine.name}
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


def _is_encrypted(key: str | None) -> bool:
    """Whether a file has a key that needs a passphrase; False if it can be read once or never."""
    try:
        if key is None or not Path(key).is_file():
            return False
        return _ENCRYPTED.search(Path(key).read_bytes()) is not None
    except OSError:
        return False  # which is said when it is used


def _warn_if_expired(certificate: str | None) -> None:
    """Log the date of a certificate that has expired, which OpenSSL serves all the same."""
    if certificate is None:
        return
    try:  # ssl itself reads only the certificates of peers
        from _ssl import _test_decode_cert  # type: ignore[attr-defined]

        end = ssl.cert_time_to_seconds(_test_decode_cert(certificate)["notAfter"])
    except (ImportError, OSError, KeyError, ValueError):  # a form that only OpenSSL knows
        return
    if end < time.time():
        day = datetime.fromtimestamp(end, UTC).isoformat()
        fields = {"file": certificate, "expired": day}
        logger.warning(
            "the TLS certificate has expired, so clients refuse it; renew it",
            extra={"fields": fields},
        )


def _locked_key(options: ServeOptions) -> str:
    return (
        f"{options.tls_key}: is encrypted, and its passphrase was not given; decrypt it first, "
        "with openssl pkey for instance"
    )


def _unusable(options: ServeOptions, error: OSError | ValueError) -> str:
    """Which of the TLS files cannot be used, and why."""
    for file, what in ((options.tls_certificate, "CERTIFICATE"), (options.tls_key, "PRIVATE KEY")):
        path = Path(file or "")
        try:
            begins = re.compile(f"^-----BEGIN [A-Z ]*{what}-----".encode(), re.MULTILINE)
            if path.is_file() and not begins.search(path.read_bytes()):
                return (
                    f"{file}: the TLS files cannot be used: there is no {what.lower()} in PEM form "
                    f"in it, which begins with -----BEGIN {what}-----"
                )
        except OSError as unread:
            return f"{file}: the TLS files cannot be used: {unread.strerror}"
    if getattr(error, "reason", None) == "KEY_VALUES_MISMATCH":
        reason = "the key is not that of the certificate"
    else:
        reason = getattr(error, "strerror", None) or str(error)
    return f"{options.tls_certificate}, {options.tls_key}: the TLS files cannot be used: {reason}"


def _address(host: str, port: int) -> tuple[socket.AddressFamily, Any]:
    """Where to listen: IPv4 where a name has addresses of both kinds.

    Raises OSError or UnicodeError for what is no host, OSError for an empty one, which the system
    would take for all addresses.
    """
    if not host:
        raise OSError("it is empty; give an address, 0.0.0.0 for all")
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, *_, address = min(found, key=lambda one: one[0] != socket.AF_INET)
    return family, address


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


def _not_listening(options: ServeOptions, error: OSError | UnicodeError) -> str:
    code = getattr(error, "errno", None)
    if code == errno.EADDRINUSE:
        return (
            f"port {options.port} of {options.host} is in use; "
            "choose another --port, or 0 for any that is free"
        )
    if code == errno.EACCES:
        return f"port {options.port} may not be used; choose a --port from 1024 on"
    said = (error.strerror or str(error)) if isinstance(error, OSError) else None
    reason = (said or "it is no name of a host").partition(" (while")[0]
    return f"--host {options.host or repr('')} cannot be listened at: {reason}"


def _config(engine: Engine, options: ServeOptions) -> uvicorn.Config:
    def protocol(**arguments: Any) -> asyncio.Protocol:
        if context is None:
            return Connection(options, **arguments)
        return Handshake(options, context, handshakes, arguments)

    context, handshakes = None, set[Handshake]()
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
    # uvicorn's sockets are plain ones; asyncio would say nothing of a client before its handshake.
    context, config.ssl = config.ssl, None
    return config


class _Uvicorn(uvicorn.Server):
    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        await self._cancelled()
        for connection in list(self.server_state.connections):
            connection.transport.abort()  # it has had its time
        await asyncio.sleep(0)
        await self._cancelled()

    async def _cancelled(self) -> None:
        """Wait a while for what cancelled requests still tell their clients."""
        if tasks := self.server_state.tasks:
            await asyncio.wait(tasks, timeout=_LAST_S)
