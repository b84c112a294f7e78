"""Whatever a client sends or stops doing: an error in OpenAI's shape, and no harm to others."""

from __future__ import annotations

import json
import logging
import socket
import ssl
import struct
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI

from qoff.api.requests import asked

from .conftest import MODEL, OPTIONS, Running, running

CHAT = [{"role": "user", "content": "Hi"}]
CHATS, TEXTS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(autouse=True)
def no_traceback(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Nothing a client does is an error of the server, in the log or in a task."""
    yield
    found = [
        one
        for one in caplog.records
        if one.levelno >= logging.ERROR and one.name in ("uvicorn.error", "asyncio", "qoff.serve")
    ]
    assert [one.getMessage() for one in found] == []


def wait_for(condition: Callable[[], bool], seconds: float = 5) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def idle(served: Running) -> bool:
    assert served.engine.llm is not None
    return served.engine.in_flight == 0 and served.engine.llm.kv_used == 0


def chat(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": CHAT, "max_tokens": 2, **more}


BODIES: dict[str, Any] = {
    "empty": b"",
    "no JSON": b"hello",
    "cut": b'{"messages": [',
    "a list": b"[]",
    "deep lists": b'{"messages": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    "deep objects": b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    "invalid UTF-8": b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}',
    "half a pair": b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    "NaN": b'{"messages": [{"role": "user", "content": "a"}], "temperature": NaN}',
    "infinite": b'{"messages": [{"role": "user", "content": "a"}], "temperature": 1e999}',
    "long number": b'{"messages": [{"role": "user", "content": "a"}], "seed": '
    + b"9" * 5000
    + b"}",
    "no messages": chat(messages=[]),
    "messages of another type": chat(messages="Hi"),
    "no role": chat(messages=[{"content": "Hi"}]),
    "an image": chat(messages=[{"role": "user", "content": [{"type": "image_url"}]}]),
    "unknown field": chat(best_of=3),
    "unknown field of a message": chat(messages=[{"role": "user", "content": "", "x": 1}]),
    "unknown nested": chat(stream=True, stream_options={"x": 1}),
    "negative temperature": chat(temperature=-1),
    "temperature as text": chat(temperature="1"),
    "no tokens": chat(max_tokens=0),
    "a stop token that is not there": chat(stop_token_ids=[2**63]),
    "hundreds of stop texts": chat(stop=["x"] * 300),
    "hundreds of fields": chat(**{f"x{i}": 1 for i in range(300)}),
    "top_p": chat(top_p=2),
    "too many answers": chat(n=1000),
    "no answer": chat(n=0),
    "empty stop": chat(stop=""),
    "many logprobs": chat(logprobs=True, top_logprobs=21),
    "top_logprobs alone": chat(top_logprobs=2),
    "seed": chat(seed=-(2**64)),
    "a prompt too long": chat(messages=[{"role": "user", "content": "x" * 500}]),
    "own template": chat(chat_template_kwargs={"chat_template": "{{ 1 }}"}),
    "template's self": chat(chat_template_kwargs={"self": 1}),
    "usage without stream": chat(stream_options={"include_usage": True}),
}


@pytest.mark.parametrize("what", BODIES)
@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_body_is_refused(served: Running, what: str, stream: bool) -> None:
    body = BODIES[what]
    if isinstance(body, dict) and "stream_options" not in body:
        body = {**body, "stream": stream}
    status, found, _ = served.ask(CHATS, body)
    assert status == 400, found
    assert set(found["error"]) == {"message", "type", "param", "code"}
    assert found["error"]["type"] == "invalid_request_error"
    assert 0 < len(found["error"]["message"]) <= 500
    assert "Traceback" not in found["error"]["message"]
    assert idle(served)


@pytest.mark.parametrize(
    ("body", "param"),
    [(chat(temperature="1"), "temperature"), (chat(nothing=1), "nothing"), ({}, "messages")],
)
def test_the_error_names_the_field(served: Running, body: Any, param: str) -> None:
    assert served.ask(CHATS, body)[1]["error"]["param"] == param


def test_prompts_that_cannot_be_answered_are_refused(served: Running) -> None:
    for prompt in ("", [], [[]], [5, 10**9], [-1], [[5], "a"], ["a"] * 1000, 5, None):
        status, found, _ = served.ask(TEXTS, {"prompt": prompt})
        assert status in (400, 429), prompt
        assert found["error"]["message"]
    assert idle(served)


def test_other_paths_methods_and_models_are_errors_of_the_same_shape(served: Running) -> None:
    for path, body, status in (
        ("/v1/nothing", None, 404),
        ("/v1/../../etc/passwd", None, 404),
        (CHATS, None, 405),
        ("/v1/models/%2e%2e%2fx", None, 404),
        (CHATS, chat(model="gpt-4"), 404),
    ):
        found = served.ask(path, body)
        assert found[0] == status, path
        assert found[1]["error"]["message"]


def test_a_template_in_a_message_stays_text(served: Running) -> None:
    for text in ("{{ 7 * 7 }}", "{% for x in range(10**9) %}x{% endfor %}"):
        _, found, _ = served.ask("/tokenize", {"messages": [{"role": "user", "content": text}]})
        text_of = served.ask("/detokenize", {"tokens": found["tokens"]})[1]["prompt"]
        assert text in text_of


def test_megabytes_are_refused_and_not_kept(served: Running) -> None:
    big = chat(messages=[{"role": "user", "content": "x" * OPTIONS.max_request_bytes}])
    for body in (big, chat(messages=CHAT * 40_000)):
        status, found, _ = served.ask(CHATS, body)
        assert (status, found["error"]["code"]) == (413, "request_too_large")
    with served.connect() as sock:  # not announced
        sock.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        piece = b"10000\r\n" + b"x" * 65536 + b"\r\n"
        try:
            for _ in range(100):
                sock.sendall(piece)
            answer = sock.recv(65536)
        except ConnectionError:  # closed while we still write
            answer = b"HTTP/1.1 413"
    assert answer.startswith(b"HTTP/1.1 413")


def test_many_messages_that_fit_are_answered_or_too_long(served: Running) -> None:
    status, found, _ = served.ask(CHATS, chat(messages=CHAT * 10_000))
    assert status == 400
    assert "has more than 200 tokens" in found["error"]["message"]


def in_threads(*works: Callable[[], Any]) -> list[Future[Any]]:
    pool = ThreadPoolExecutor(len(works))
    found = [pool.submit(work) for work in works]
    pool.shutdown(wait=False)
    return found


def test_small_requests_do_not_wait_for_large_ones(
    served: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large bodies are read in a thread of their own, and their prompts, too."""
    llm, where = served.engine.llm, list[tuple[bool, str]]()

    def noted(works: Callable[..., Any]) -> Callable[..., Any]:
        def call(first: Any, *more: Any) -> Any:
            where.append((len(str(first)) > 1000, threading.current_thread().name))
            return works(first, *more)

        return call

    monkeypatch.setattr("qoff.serve.app.asked", noted(asked))
    monkeypatch.setattr(llm, "submit", noted(llm.submit))  # type: ignore[union-attr]
    free = threading.Event()
    try:
        served.engine._large.submit(free.wait)
        large = in_threads(
            lambda: served.ask(TEXTS, {"prompt": "x" * 70_000}),
            lambda: served.ask("/tokenize", {"prompt": "x" * 70_000}),
            lambda: served.ask("/v1/batches", {"input_file_id": "x" * 70_000}),
        )
        wait_for(lambda: served.engine._large._work_queue.qsize() == 3)
        assert served.ask(TEXTS, {"prompt": "a"})[0] == 200
        assert served.ask("/tokenize", {"prompt": "a"})[0] == 200
    finally:
        free.set()
    assert [one.result()[0] for one in large] == [400] * 3
    assert {name.partition("_")[0] for is_large, name in where if is_large} == {"qoff-serve-large"}
    assert len(where) == 4
    assert "qoff-serve-large" not in {name for is_large, name in where if not is_large}


def test_texts_that_wait_to_be_tokenized_have_a_bound(served: Running) -> None:
    engine, free = served.engine, threading.Event()
    try:
        for _ in range(2):
            engine._readers.submit(free.wait)
        waiting = in_threads(*[lambda: served.ask("/tokenize", {"prompt": "a"})] * 6)
        wait_for(lambda: engine._texts == 6)
        for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [5]})):
            status, found, headers = served.ask(path, body)
            assert (status, found["error"]["code"]) == (429, "queue_full")
            assert int(headers["retry-after"]) >= 1
    finally:
        free.set()
    assert [one.result()[0] for one in waiting] == [200] * 6
    assert served.ask("/tokenize", {"prompt": "a"})[0] == 200


def test_texts_that_are_tokenized_have_a_length(served: Running) -> None:
    status, found, _ = served.ask("/tokenize", {"prompt": "x" * 50_000})
    assert status == 200 or "more than 3200 tokens" in found["error"]["message"]
    for path, body in (
        ("/tokenize", {"prompt": "x" * 100_000}),
        ("/detokenize", {"tokens": [5] * 3201}),
    ):
        status, found, _ = served.ask(path, body)
        assert status == 400
        assert "more than 3200" in found["error"]["message"]


def test_bodies_have_room_together(checkpoint: Path) -> None:
    """Clients that send nearly all of a large body leave none for others, but for small ones."""
    size = 128 << 10
    options = replace(OPTIONS, max_request_bytes=size, read_timeout_s=10)
    large = b" " * (size - 2) + b"{}"
    with running(checkpoint, options) as served:
        held = [served.connect() for _ in range(40)]
        for sock in held:
            sock.sendall(head(size) + b" " * (size - 1))
        wait_for(lambda: served.ask(CHATS, large)[0] == 503)
        _, found, headers = served.ask(CHATS, large)
        assert found["error"]["code"] == "no_room"
        assert (int(headers["retry-after"]) >= 1, headers["connection"]) == (True, "close")
        assert served.ask(CHATS, chat())[0] == 200
        for sock in held:
            sock.close()
        wait_for(lambda: served.ask(CHATS, large)[0] == 400)
        for _ in range(40):
            assert served.ask(CHATS, large)[0] == 400  # which gives back what it kept


def test_what_is_no_http_is_told_so_and_closed(served: Running) -> None:
    for garbage in (b"\x16\x03\x01\x02\x00\x01", b"GET\r\n\r\n", b"A" * 100_000 + b"\r\n\r\n"):
        with served.connect() as sock:
            sock.sendall(garbage)
            answer = everything(sock)
        assert answer.startswith(b"HTTP/1.1 400"), garbage[:10]
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]


def everything(sock: socket.socket) -> bytes:
    found = b""
    try:
        while piece := sock.recv(65536):
            found += piece
    except ConnectionResetError:
        pass
    return found


def head(length: int) -> bytes:
    return f"POST {CHATS} HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n\r\n".encode()


def test_clients_that_send_nothing_or_too_slowly_are_given_up(served: Running) -> None:
    starts = {b"": b"HTTP/1.1 408", b"GET /health HT": b"HTTP/1.1 408", head(100): b"HTTP/1.1 408"}
    socks = {start: served.connect() for start in starts}
    for start, sock in socks.items():
        sock.sendall(start)
    for start, sock in socks.items():
        assert everything(sock).startswith(starts[start])
        sock.close()


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


def test_a_full_queue_refuses_with_429(served: Running, client: OpenAI) -> None:
    """Four are computed and four wait; then there is room again."""
    held = []
    body = {"prompt": "a", "n": 4, "max_tokens": 94, "stream": True, "ignore_eos": True}
    data = json.dumps(body).encode()
    with served.slowed():
        for count in (4, 8):
            held.append(served.connect())
            held[-1].sendall(head(len(data)).replace(CHATS.encode(), TEXTS.encode()) + data)
            wait_for(lambda count=count: served.engine.in_flight == count)  # type: ignore[misc]
        with pytest.raises(openai.RateLimitError) as refused:
            client.completions.create(model=MODEL, prompt="a")
    assert int(refused.value.response.headers["retry-after"]) >= 1
    assert refused.value.code == "queue_full"
    for one in held:
        one.close()
    wait_for(lambda: idle(served))
    assert served.ask(TEXTS, {"prompt": "a"})[0] == 200


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
        for key, status in ((None, 401), ("three", 401), ("two", 200), ("\xe9", 401)):
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            found = served.ask("/v1/models", None, headers)
            assert found[0] == status
        assert served.ask("/tokenize", {"prompt": "a"})[0] == 401
        assert served.ask("/health")[0] == served.ask("/metrics")[0] == 200
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
