"""Clients that stop reading or sending, hang up, or may not connect: no harm to others."""

from __future__ import annotations

import gc
import json
import socket
import ssl
import struct
import threading
import time
import urllib.request
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import openai
import pytest
from openai import OpenAI

from qoff.serve.bodies import BodyRoom
from qoff.serve.connection import Connection
from qoff.serve.guard import Guard

from .conftest import MODEL, OPTIONS, Running, running
from .test_hostile_clients import (
    CHAT,
    CHATS,
    TEXTS,
    chat,
    everything,
    head,
    idle,
    in_threads,
    no_traceback,
    wait_for,
)

__all__ = ["no_traceback"]  # a fixture


def test_what_is_no_http_is_told_so_and_closed(served: Running) -> None:
    for garbage in (b"\x16\x03\x01\x02\x00\x01", b"GET\r\n\r\n", b"A" * 100_000 + b"\r\n\r\n"):
        with served.connect() as sock:
            sock.sendall(garbage)
            answer = everything(sock)
        assert answer.startswith(b"HTTP/1.1 400"), garbage[:10]
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]


def test_clients_that_send_nothing_or_too_slowly_are_given_up(served: Running) -> None:
    starts = {b"": b"HTTP/1.1 408", b"GET /health HT": b"HTTP/1.1 408", head(100): b"HTTP/1.1 408"}
    socks = {start: served.connect() for start in starts}
    for start, sock in socks.items():
        sock.sendall(start)
    for start, sock in socks.items():
        assert everything(sock).startswith(starts[start])
        sock.close()


def test_each_request_of_a_connection_has_to_come_in_time(served: Running) -> None:
    """Between them it may be silent for longer; whoever acknowledges nothing is given up."""
    with served.connect() as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert sock.recv(1000).startswith(b"HTTP/1.1 200")
        mine = sock.getsockname()
        (one,) = (
            x
            for x in served.server._server.server_state.connections
            if isinstance(x, Connection) and x.transport.get_extra_info("peername") == mine
        )
        assert one._deadline is None
        there = one.transport.get_extra_info("socket")
        assert there.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 500
        assert there.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        sock.sendall(b"GET /health HT")
        assert everything(sock).startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize("reset", [False, True])
def test_a_client_that_hangs_up_frees_its_place(
    served: Running, reset: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its places are another's in the round after the one in which that was noticed."""
    llm, cancelled = served.engine.llm, threading.Event()
    assert llm is not None
    cancel = llm.cancel
    monkeypatch.setattr(llm, "cancel", lambda call: (cancel(call), cancelled.set()))
    body = json.dumps(chat(max_tokens=60, n=4, ignore_eos=True, stream=not reset)).encode()
    wait_for(lambda: idle(served))
    with served.held() as rounds:
        sock = served.connect()
        sock.sendall(head(len(body)) + body)
        rounds.end()
        rounds.under_way()
        if reset:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        else:
            assert sock.recv(10)
        sock.close()
        assert cancelled.wait(20)
        (other,) = in_threads(lambda: served.ask(TEXTS, {"prompt": "a", "n": 4, "max_tokens": 1}))
        wait_for(lambda: llm.waiting == 4)
        rounds.end(2)
        assert other.result(20)[0] == 200
    wait_for(lambda: idle(served))


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_sends_no_more_is_answered(served: Running, stream: bool) -> None:
    """As `nc -N` and some proxies do; one that is gone frees its place before a round ends."""
    body = json.dumps(chat(max_tokens=3, ignore_eos=True, stream=stream)).encode()
    whole = head(len(body)) + body
    wait_for(lambda: idle(served))
    with served.held() as rounds, served.connect() as sock:
        sock.sendall(whole)
        sock.shutdown(socket.SHUT_WR)
        rounds.under_way()
        assert sock.recv(100).startswith(b"HTTP/1.1 100")
        with served.connect() as gone:
            gone.sendall(whole)
            wait_for(lambda: served.engine.in_flight == 2)
        wait_for(lambda: served.engine.in_flight == 1)
        with served.connect() as old:  # HTTP/1.0 has no answers that say nothing
            old.sendall(whole.replace(b"HTTP/1.1", b"HTTP/1.0"))
            old.shutdown(socket.SHUT_WR)
            assert everything(old) == b""
        rounds.free()
        answer = everything(sock)
    before, _, after = answer.partition(b"HTTP/1.1 200 OK\r\n")
    assert not before.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"")
    assert (b"[DONE]" if stream else b'"completion_tokens":3') in after
    with served.connect() as sock:  # two requests at once, and what is cut is nobody's
        sock.sendall(whole + b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" + whole[:-1])
        sock.shutdown(socket.SHUT_WR)
        assert everything(sock).count(b"HTTP/1.1 200 OK") == 2
    with served.connect() as sock:  # gone amid the second of three, it is asked no more
        sock.sendall(3 * whole)
        sock.shutdown(socket.SHUT_WR)
        found = b""
        while b"HTTP/1.1 200 OK" not in found:
            found += sock.recv(1000)
        with served.held() as rounds:
            rounds.under_way()
            rounds.free()
    wait_for(lambda: idle(served))
    wait_for(lambda: not _closed())


def _closed() -> list[Connection]:
    """Connections that are closed, and that something still knows."""
    gc.collect()
    found = (x for x in gc.get_objects() if isinstance(x, Connection))
    return [x for x in found if x.transport is None or x.transport.is_closing()]


def test_answers_that_were_given_up_are_no_negative_number(served: Running) -> None:
    """They wait until the round ends, and nobody asks for them any more."""
    llm = served.engine.llm
    assert llm is not None
    body = json.dumps(chat(max_tokens=60, n=4, ignore_eos=True, stream=True)).encode()
    wait_for(lambda: idle(served))
    with served.held() as rounds:
        socks = [served.connect(), served.connect()]
        for sock in socks:
            sock.sendall(head(len(body)) + body)
            rounds.under_way()
        wait_for(lambda: llm.waiting == 4)
        figures = served.ask("/metrics")[1].splitlines()
        for name in ("running", "waiting"):
            assert f'vllm:num_requests_{name}{{model_name="{MODEL}"}} 4.0' in figures
        for sock in socks:
            sock.close()
        wait_for(lambda: served.engine.in_flight == 0)
        figures = served.ask("/metrics")[1].splitlines()
    assert f'vllm:num_requests_running{{model_name="{MODEL}"}} 0.0' in figures
    wait_for(lambda: idle(served))


def test_a_stream_that_is_given_up_by_the_client_library(served: Running, client: OpenAI) -> None:
    rounds = served.engine.llm.rounds  # type: ignore[union-attr]
    stream = client.chat.completions.create(
        model=MODEL,
        messages=CHAT,
        stream=True,
        max_tokens=70,
        extra_body={"ignore_eos": True},  # type: ignore[arg-type]
    )
    next(stream)
    before = rounds[-1].number
    stream.close()
    wait_for(lambda: idle(served))
    assert rounds[-1].number - before < 60


def test_a_full_queue_refuses_with_429(
    served: Running, client: OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four are computed and four wait; then there is room again."""
    held = []
    body = {"prompt": "a", "n": 4, "max_tokens": 94, "stream": True, "ignore_eos": True}
    data = json.dumps(body).encode()
    wait_for(lambda: idle(served))
    with served.held():
        for count in (4, 8):
            held.append(served.connect())
            held[-1].sendall(head(len(data)).replace(CHATS.encode(), TEXTS.encode()) + data)
            wait_for(lambda count=count: served.engine.in_flight == count)  # type: ignore[misc]
        with pytest.raises(openai.RateLimitError) as refused:
            client.completions.create(model=MODEL, prompt="a")
        assert refused.value.code == "queue_full"
        # A fifth that waits begins after what is computed and five quarters of that.
        for lasts_s, wanted in ((0.0, "1"), (50.0, "113"), (1e6, "600")):
            monkeypatch.setattr(served.engine, "_lasts_s", lasts_s)
            assert served.ask(TEXTS, {"prompt": "a"})[2]["retry-after"] == wanted
    for one in held:
        one.close()
    wait_for(lambda: idle(served))
    assert served.ask(TEXTS, {"prompt": ["a"] * 8, "max_tokens": 1})[0] == 200
    status, found, _ = served.ask(TEXTS, {"prompt": ["a"] * 9})
    assert status == 400
    assert found["error"]["message"].endswith("ask for 1 to 8")


def test_a_reader_that_stops_reading_is_given_up(checkpoint: Path, served: Running) -> None:
    """It pipelines requests with much to read, and reads nothing."""
    body = json.dumps({"messages": [{"role": "user", "content": "Hi"}]}).encode()
    request = head(len(body)).replace(CHATS.encode(), b"/tokenize") + body
    sock = served.connect()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    sock.settimeout(0.2)
    with suppress(TimeoutError, ConnectionError):
        for _ in range(1000):
            sock.sendall(request * 100)
        pytest.fail("the server takes requests without end")
    assert served.ask("/health")[0] == 200
    wait_for(lambda: not served.server.connections, 20)
    sock.close()


def test_a_reader_that_trickles_is_given_up(served: Running) -> None:
    """It takes a byte now and then, so that TCP goes on, of an answer larger than its buffers."""
    body = json.dumps({"messages": [{"role": "user", "content": "Hi"}]}).encode()
    request = head(len(body)).replace(CHATS.encode(), b"/tokenize") + body
    with served.connect() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        sock.settimeout(0.2)
        with suppress(TimeoutError, ConnectionError):
            for _ in range(1000):
                sock.sendall(request * 100)
        start = time.monotonic()
        with suppress(ConnectionError):
            while served.server.connections and time.monotonic() < start + 10:
                sock.recv(1)
                time.sleep(0.05)
        assert time.monotonic() < start + 8


def test_one_connection_too_many_is_refused(checkpoint: Path) -> None:
    with running(checkpoint, replace(OPTIONS, max_connections=3, read_timeout_s=5)) as served:
        held = [served.connect() for _ in range(3)]
        wait_for(lambda: served.server.connections == 3)
        with served.connect() as sock:
            assert everything(sock).startswith(b"HTTP/1.1 503")
        for one in held:
            one.close()
        wait_for(lambda: not served.server.connections)
        assert served.ask("/health")[0] == 200


def test_tls(checkpoint: Path) -> None:
    files = str(Path(__file__).with_name("localhost.pem"))
    with running(checkpoint, replace(OPTIONS, tls_certificate=files, tls_key=files)) as served:
        url = served.url.replace("http:", "https:").removesuffix("/v1")
        context = ssl.create_default_context(cafile=files)
        with urllib.request.urlopen(f"{url}/health", context=context) as answer:
            assert answer.status == 200
        with served.connect() as sock:  # no handshake
            sock.sendall(b"GET /health HTTP/1.1\r\n\r\n")
            assert not everything(sock).startswith(b"HTTP")


def test_handshakes_are_connections_and_end_in_time(checkpoint: Path) -> None:
    files = str(Path(__file__).with_name("localhost.pem"))
    options = replace(OPTIONS, tls_certificate=files, tls_key=files, max_connections=3)
    context = ssl.create_default_context(cafile=files)
    with running(checkpoint, replace(options, read_timeout_s=1)) as served:
        silent = [served.connect() for _ in range(3)]
        time.sleep(0.1)
        start = time.monotonic()
        with served.connect() as sock, pytest.raises(OSError):  # noqa: PT011
            context.wrap_socket(sock, server_hostname="localhost")
        assert time.monotonic() < start + 0.8  # before the others have had their time
        for one in silent:
            assert not everything(one)
            one.close()
        url = f"https://127.0.0.1:{served.server.port}/health"
        with urllib.request.urlopen(url, context=context) as answer:
            assert answer.status == 200


def test_keys_are_asked_for_but_for_health(checkpoint: Path) -> None:
    options = replace(OPTIONS, api_keys=("one", "two"), cors_origins=("https://a.example",))
    with running(checkpoint, options) as served:
        for given, status in (
            (None, 401),
            ("Bearer three", 401),
            ("Bearer two", 200),
            ("bearer  one ", 200),
            ("Bearer \xe9", 401),
            ("Basic two", 401),
            ("two", 401),
        ):
            headers = {} if given is None else {"Authorization": given}
            assert served.ask("/v1/models", None, headers)[0] == status, given
        assert served.ask("/tokenize", {"prompt": "a"})[0] == served.ask("/stats")[0] == 401
        assert [served.ask(path)[0] for path in ("/", "/health", "/metrics")] == [200] * 3
        asks_first = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
        assert served.ask(CHATS, None, asks_first, method="OPTIONS")[0] == 200  # has no key yet
        assert served.ask(CHATS, method="OPTIONS")[0] == 401
        headers = {"Authorization": "Bearer one", "Origin": "https://a.example"}
        assert served.ask("/v1/models", None, headers)[2]["access-control-allow-origin"]
        assert served.ask("/tokenize", {"prompt": "a"}, headers)[0] == 200


def test_no_other_page_may_ask_by_default(served: Running) -> None:
    found = served.ask("/v1/models", None, {"Origin": "https://a.example"})[2]
    assert "access-control-allow-origin" not in found
    host = f"127.0.0.1:{served.server.port}"
    for origin, status in (("https://a.example", 403), ("null", 403), (f"http://{host}", 200)):
        headers = {"Origin": origin, "Host": host}
        assert served.ask("/tokenize", {"prompt": "a"}, headers)[0] == status
    every = Guard(served.server._server.config.app, (), ("*",), BodyRoom(1))
    every._check_origin({"method": "POST", "headers": [(b"origin", b"https://a.example")]})
