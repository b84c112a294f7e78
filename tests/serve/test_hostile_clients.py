"""Whatever a client sends: an error in OpenAI's shape, and no harm to others."""

from __future__ import annotations

import gzip
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

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


def test_refused_prompts_say_nothing_of_how_long_answers_take(
    served: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From that a full queue tells when to try again."""
    monkeypatch.setattr(served.engine, "_lasts_s", 50.0)
    assert served.ask(TEXTS, {"prompt": "x" * 500})[0] == 400
    wait_for(lambda: not served.engine._running)
    assert served.engine._lasts_s == 50
    assert served.ask(TEXTS, {"prompt": "x", "max_tokens": 1})[0] == 200
    wait_for(lambda: not served.engine._running)
    assert 40 < served.engine._lasts_s < 50


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


def test_a_target_may_be_absolute(served: Running) -> None:
    """As some proxies send it; its host is the one that was asked, whatever `Host` says."""
    for path, status in (
        ("http://one.example/v1/models", 200),
        ("HTTP://one.example:80/v1/models?a=b", 200),
        ("https://one.example", 200),
        ("http://one.example/v1/models/%74iny", 200),
        ("http://one.example/v1/nothing", 404),
        ("ftp://one.example/v1/models", 404),
    ):
        assert served.ask(path)[0] == status, path
    for origin, status in (("http://one.example", 200), ("http://two.example", 403)):
        headers = {"Host": "two.example", "Origin": origin}
        found = served.ask("http://one.example/tokenize", {"prompt": "a"}, headers)
        assert found[0] == status, origin


def test_a_slash_at_the_end_is_no_redirect(served: Running) -> None:
    """Which would lead past the prefix of a proxy."""
    assert served.ask("/tokenize/", {"prompt": "a"})[0] == 200
    for path in ("/v1/models/", "http://one.example/v1/models/"):
        assert served.ask(path)[1]["object"] == "list"


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


def test_a_compressed_body_is_refused_as_such(served: Running) -> None:
    body = json.dumps(chat()).encode()
    for name, data, wanted in (("gzip", gzip.compress(body), 415), ("Identity", body, 200)):
        status, said, _ = served.ask(CHATS, data, {"Content-Encoding": name})
        assert status == wanted
        assert wanted == 200 or "Content-Encoding 'gzip'" in said["error"]["message"]


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
