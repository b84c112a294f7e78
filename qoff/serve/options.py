"""What a server is told beside its model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ServeOptions:
    """Where a server listens, whom it answers, and what it takes of them."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()  # none: everybody
    cors_origins: tuple[str, ...] = ()  # none: no other page may ask
    tls_certificate: str | None = None  # PEM files
    tls_key: str | None = None
    thinking: bool = True  # is told apart from what answers say
    max_queue: int = 64  # answers that wait for a place
    max_connections: int = 1024
    max_request_bytes: int = 4 << 20
    request_timeout_s: float = 600.0  # for a whole answer
    read_timeout_s: float = 20.0  # for a client to send a request, or to take what it is sent
    shutdown_timeout_s: float = 10.0  # for answers that are not done
