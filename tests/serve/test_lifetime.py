"""How a server starts, loads its model, ends, and what it leaves behind."""

from __future__ import annotations

import gc
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from http.client import HTTPConnection
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from qoff.cli.main import app
from qoff.cli.options import model_name
from qoff.engine import LLM
from qoff.errors import ConversionError, FormatError, QoffError
from qoff.serve.engine import Engine
from qoff.serve.logs import logging_to_stderr
from qoff.serve.server import Server, serve

from .conftest import MODEL, OPTIONS, PLAN, Running, running
from .test_hostile_clients import wait_for

CHATS = "/v1/chat/completions"
LONG: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Hi"}],
    "max_tokens": 80,
    "stream": True,
    "ignore_eos": True,
}

OTHER_KEY = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQghrRO3KwZOtT/ZnSp
NIrk9KUnX1qk4hpAFarLb9+VgIWhRANCAAT8p26xidDX5RmRsRV6yvbwxBJWVVRX
Z6ebJt0Z2QTh1jTQfiUeYiiXgbNx+l/ooau+aI7eD4jtTveJRoYXAHSb
-----END PRIVATE KEY-----
"""

EXPIRED = """\
-----BEGIN CERTIFICATE-----
MIIBDjCBtgIBATAKBggqhkjOPQQDAjAUMRIwEAYDVQQDDAkxMjcuMC4wLjEwHhcN
MjAwMTAxMDAwMDAwWhcNMjEwMTAxMDAwMDAwWjAUMRIwEAYDVQQDDAkxMjcuMC4w
LjEwWTATBgcqhkjOPQIBBggqhkjOPQMBBwNCAATlcNy9C0uUaK6h+i/5pejxz32H
DOLhDt9/IDPGto9W3LgTO+TBw9sMiAXCEkeoazcWVaWexTG6d7OB818DbxCgMAoG
CCqGSM49BAMCA0cAMEQCIHRaL0HYjyBgiGNoacObnPgOuzi35Rw1hgfudvRZ5N4V
AiA8s5Pqh4Ow0/VRkImtR4IJANegUYtjNtnxdUQU/PqYFA==
-----END CERTIFICATE-----
"""  # of the key of localhost.pem


def names() -> set[str]:
    """Threads of a server."""
    found = {thread.name for thread in threading.enumerate()}
    return {name for name in found if name.startswith("qoff-serve")}


def test_a_model_that_is_loading_answers_503() -> None:
    engine = Engine(MODEL, 4, 10)
    with Server(engine, OPTIONS) as server:
        served = Running(server, engine)
        for path, body in (("/health", None), (CHATS, LONG), ("/tokenize", {"prompt": "a"})):
            status, found, headers = served.ask(path, body)
            assert (status, found["error"]["code"]) == (503, "loading")
            assert headers["retry-after"]
        assert served.ask("/v1/models")[0] == 200
        assert served.ask("/metrics")[0] == 200
    engine.stop()


def test_what_fails_in_loading_ends_the_server() -> None:
    before = names()

    def load() -> LLM:
        raise FormatError("no model")

    with pytest.raises(FormatError, match="no model"):
        serve(load, Engine(MODEL, 4, 10), OPTIONS)
    assert names() == before


def test_what_ends_the_engine_ends_the_server(checkpoint: Path) -> None:
    before = names()

    def load() -> LLM:
        llm = LLM(checkpoint, PLAN)
        llm.close()  # so that no round can be computed
        return llm

    with pytest.raises(QoffError, match="closed"):
        serve(load, Engine(MODEL, 4, 10), OPTIONS)
    assert names() == before


def test_an_address_in_use_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        options = replace(OPTIONS, port=taken.getsockname()[1])
        with pytest.raises(OSError, match="in use") as raised:
            Server(Engine(MODEL, 4, 10), options)
    assert str(raised.value).startswith(f"port {options.port} of 127.0.0.1")


def test_an_empty_host_is_not_all_addresses() -> None:
    with pytest.raises(OSError, match="it is empty; give an address"):
        Server(Engine(MODEL, 4, 10), replace(OPTIONS, host=""))


def test_a_name_that_has_only_an_ipv6_address_is_listened_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6")
    resolve = socket.getaddrinfo

    def only_ipv6(host: Any, *rest: Any, **options: Any) -> Any:
        return resolve("::1" if host == "six.example" else host, *rest, **options)

    monkeypatch.setattr(socket, "getaddrinfo", only_ipv6)
    server = Server(Engine(MODEL, 4, 10), replace(OPTIONS, host="six.example"))
    with server, socket.create_connection(("::1", server.port), timeout=5):
        pass


@pytest.mark.parametrize("host", ["no name.invalid", "192.0.2.1", "a" * 70])
def test_a_host_that_cannot_be_listened_at_is_named(host: str) -> None:
    with pytest.raises(OSError, match="cannot be listened at") as raised:
        Server(Engine(MODEL, 4, 10), replace(OPTIONS, host=host))
    assert host in str(raised.value)
    assert "Errno" not in str(raised.value)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--cors-origin", "example.com", "like https://example.com"),
        ("--cors-origin", "https://example.com/", "like https://example.com"),
        ("--max-file-size", "much", "--max-file-size: 'much' is not a size"),
        ("--files", __file__, "is no folder; files and batches need one"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(
    checkpoint: Path, option: str, value: str, message: str
) -> None:
    found = CliRunner().invoke(app, ["serve", str(checkpoint), option, value])
    assert found.exit_code == 1
    assert message in found.stderr


def test_a_link_is_served_under_its_own_name(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").symlink_to(checkpoint)
    assert model_name(str(tmp_path / "mine")) == "mine"


@pytest.mark.parametrize("bound", [0.2, 600])
def test_open_answers_end_within_the_bound(
    checkpoint: Path, bound: float, caplog: pytest.LogCaptureFixture
) -> None:
    """A short bound cuts streams off, as an event says; a long one lets them end."""
    caplog.set_level(logging.INFO, "qoff.serve")
    before = names()
    options = replace(OPTIONS, shutdown_timeout_s=bound)
    with running(checkpoint, options) as served, served.held() as rounds:
        data = json.dumps(LONG).encode()
        with served.connect() as sock:
            sock.sendall(
                f"POST {CHATS} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n".encode()
                + data
            )
            rounds.end()
            rounds.under_way()
            found = sock.recv(100)
            closing = threading.Thread(target=served.server.close, daemon=True)
            closing.start()
            wait_for(lambda: served.server._server.should_exit)
            if bound > 1:
                rounds.free()  # else no answer ends
            closing.join(60)
            assert not closing.is_alive()
            while piece := sock.recv(65536):
                found += piece
    assert found.startswith(b"HTTP/1.1 200")
    *_, before_last, last = found.split(b"data: ")
    assert last.startswith(b"[DONE]")
    stopped = before_last.startswith(b'{"error":{"message":"the server is stopping"')
    assert stopped == (bound < 1)
    assert found.endswith(b"\r\n0\r\n\r\n")
    logged: list[Any] = [one for one in caplog.records if one.getMessage() == "request"]
    assert [one.fields["status"] for one in logged] == [200 if bound > 1 else 503]
    assert not any(one.exc_info or "Exception" in one.getMessage() for one in caplog.records)
    assert names() == before


def test_requests_that_are_cut_off_at_the_end_are_no_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    engine, options = Engine(MODEL, 4, 10), replace(OPTIONS, shutdown_timeout_s=0.1)
    head = f"POST {CHATS} HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n"
    with (
        logging_to_stderr("info"),
        Server(engine, options) as server,
        Running(server, engine).connect() as sock,
    ):
        sock.sendall(head.encode())
        end = time.monotonic() + 5
        while not server._server.server_state.tasks:
            assert time.monotonic() < end
        server.close()
        assert sock.recv(1000).startswith(b"HTTP/1.1 503")
    engine.stop()
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["level"] for line in lines] == ["warning", "info"]
    assert "graceful shutdown exceeded" in lines[0]["event"]


def test_requests_that_take_too_long_are_ended(checkpoint: Path) -> None:
    options = replace(OPTIONS, request_timeout_s=0.6)
    with running(checkpoint, options) as served, served.slowed():
        llm, body = served.engine.llm, {**LONG, "stream": False}
        assert llm is not None
        status, found, _ = served.ask(CHATS, body)
        assert (status, found["error"]["code"]) == (504, "timeout")
        status, found, _ = served.ask(CHATS, LONG)
        assert status == 200
        assert '"code":"timeout"' in found
        end = time.monotonic() + 5
        while llm.kv_used or served.engine.in_flight:
            assert time.monotonic() < end


@pytest.mark.parametrize(("body", "works"), [({"stream": False}, 0), ({}, 0), ({}, 3)])
def test_a_failed_round_is_an_error_for_those_in_it_alone(
    checkpoint: Path, caplog: pytest.LogCaptureFixture, body: dict[str, Any], works: int
) -> None:
    """The log says why, as the disk may be at fault, and clients its id: paths are not theirs."""
    caplog.set_level(logging.INFO, "qoff.serve")
    why, rounds = f"{checkpoint}/layer: is broken", count()
    with running(checkpoint) as served, served.slowed(0):
        llm = served.engine.llm
        assert llm is not None
        compute: Any = llm._rounds._schedule
        round_ = compute.round

        def fails(passes: Any) -> Any:
            if next(rounds) < works:
                return round_(passes)
            compute.round = round_
            raise FormatError(why)

        compute.round = fails
        status, found, headers = served.ask(CHATS, {**LONG, **body})
        assert served.ask(CHATS, LONG)[0] == 200
    logged: list[Any] = [one for one in caplog.records if one.getMessage() == "request"]
    assert [one.fields.get("error") for one in logged] == [why, None]
    request_id = logged[0].fields["id"]
    if works:
        *_, event, done, _ = found.split("\n\n")
        assert (status, done) == (200, "data: [DONE]")
        found = json.loads(event.removeprefix("data: "))
    else:
        assert (status, headers["x-request-id"]) == (500, request_id)
    assert request_id in found["error"]["message"]
    assert str(checkpoint) not in found["error"]["message"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ssl-certfile", __file__], "TLS needs both"),
        (["--ssl-certfile", __file__, "--ssl-keyfile", __file__], "TLS files cannot be used"),
        (["--kv", "none"], "KV cache of a batch is packed"),
        (["--host", "999.0.0.1"], ""),
        (["--api-key", ""], "an API key is empty"),
        (["--api-key", "from a file\n"], "an API key has blanks"),
    ],
)
def test_wrong_options_are_one_line(
    checkpoint: Path, options: list[str], message: str, tmp_path: Path
) -> None:
    command = ["serve", str(checkpoint), "--port", "0", "--files", str(tmp_path)]
    found = CliRunner().invoke(app, [*command, *options])
    assert found.exit_code == 1
    (line,) = [line for line in found.stderr.splitlines() if line.startswith("qoff: ")]
    assert message in line


def test_an_encrypted_key_is_told_as_such(checkpoint: Path, tmp_path: Path) -> None:
    """Nobody may be there whom OpenSSL could ask."""
    key = tmp_path / "key.pem"
    key.write_text("-----BEGIN ENCRYPTED PRIVATE KEY-----\nMIIFHDBO\n")
    command = ["serve", str(checkpoint), "--port", "0", "--files", str(tmp_path)]
    tls = ["--ssl-certfile", str(key), "--ssl-keyfile", str(key)]
    found = CliRunner().invoke(app, [*command, *tls])
    assert f"qoff: {key}: is encrypted" in found.stderr
    assert found.exit_code == 1


@pytest.mark.parametrize(
    ("certificate", "key", "named", "why"),
    [
        ("key", "both", "key", "no certificate in PEM form"),
        ("both", "certificate", "certificate", "no private key in PEM form"),
        ("both", "empty", "empty", "no private key in PEM form"),
        ("both", "missing", "missing", "No such file or directory"),
        ("both", "other", "both", "the key is not that of the certificate"),
    ],
)
def test_the_tls_file_at_fault_is_named(
    certificate: str, key: str, named: str, why: str, tmp_path: Path
) -> None:
    both = Path(__file__).with_name("localhost.pem").read_text()
    begin = both.index("-----BEGIN PRIVATE KEY")
    parts = {"both": both, "certificate": both[:begin], "key": both[begin:], "empty": ""}
    for name, text in {**parts, "other": OTHER_KEY}.items():
        (tmp_path / name).write_text(text)
    options = replace(
        OPTIONS, tls_certificate=str(tmp_path / certificate), tls_key=str(tmp_path / key)
    )
    with pytest.raises(QoffError, match=why) as raised:
        Server(Engine(MODEL, 4, 10), options)
    assert str(tmp_path / named) in str(raised.value)
    assert "_ssl.c" not in str(raised.value)


def test_a_certificate_that_has_expired_is_said_with_its_date(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good, expired = Path(__file__).with_name("localhost.pem"), tmp_path / "expired.pem"
    expired.write_text(EXPIRED)
    for certificate in (good, expired):
        options = replace(OPTIONS, tls_certificate=str(certificate), tls_key=str(good))
        with Server(Engine(MODEL, 4, 10), options):
            pass
    (said,) = caplog.records
    assert said.levelname == "WARNING"
    assert "certificate has expired" in said.getMessage()
    assert vars(said)["fields"] == {"file": str(expired), "expired": "2021-01-01T00:00:00+00:00"}
    trusted = tmp_path / "trusted.pem"  # a form that OpenSSL takes, and Python does not read
    trusted.write_text(good.read_text().replace(" CERTIFICATE", " TRUSTED CERTIFICATE"))
    options = replace(OPTIONS, tls_certificate=str(trusted), tls_key=str(good))
    with Server(Engine(MODEL, 4, 10), options):
        pass


def test_a_model_is_converted_behind_an_open_port(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = list[tuple[int, str]]()

    def converting(*_: Any, **__: Any) -> Path:
        (port,) = (sock.getsockname()[1] for sock in listening)
        connection = HTTPConnection("127.0.0.1", port, timeout=20)
        connection.request("GET", "/health")
        answer = connection.getresponse()
        said.append((answer.status, json.loads(answer.read())["error"]["code"]))
        connection.close()
        raise ConversionError("the model is broken")

    listening, create = list[socket.socket](), socket.create_server

    def created(*place: Any, **how: Any) -> socket.socket:
        listening.append(create(*place, **how))
        return listening[-1]

    monkeypatch.setattr(socket, "create_server", created)
    monkeypatch.setattr("qoff.hf.checkpoints.find_checkpoint", converting)
    command = ["serve", str(checkpoint), "--port", "0", "--files", str(tmp_path)]
    found = CliRunner().invoke(app, command)
    assert found.exit_code == 1
    assert "qoff: the model is broken" in found.stderr
    assert said == [(503, "loading")]


def test_all_lines_before_the_error_are_json(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a conversion, too, and what other parts of qoff warn of."""

    def converting(*_: Any, progress: Any, **__: Any) -> Path:
        progress(1, 3)
        logging.getLogger("qoff.hf.checkpoints").warning("converted once more")
        raise ConversionError("the model is broken")

    monkeypatch.setattr("qoff.hf.checkpoints.find_checkpoint", converting)
    for module in ("qoff.serve.logs", "qoff.cli.output"):
        monkeypatch.setattr(f"{module}._EACH_S", -1.0)
    command = ["serve", str(checkpoint), "--port", "0", "--files", str(tmp_path)]
    *lines, last = CliRunner().invoke(app, command).stderr.splitlines()
    assert last == "qoff: the model is broken"
    said = [json.loads(line) for line in lines]
    assert [one["event"] for one in said] == [
        "loading",
        "converting",
        "converted once more",
        "stopping",
    ]
    assert (said[1]["done"], said[1]["total"]) == (1, 3)


@pytest.mark.parametrize("name", ["not there", "empty", "file.bin"])
def test_nothing_is_made_for_what_is_no_model(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QOFF_CACHE", str(tmp_path / "cache"))
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.bin").touch()
    found = CliRunner().invoke(app, ["serve", str(tmp_path / name), "--port", "0"])
    assert found.exit_code == 1
    (line,) = found.stderr.splitlines()
    assert line.startswith(f"qoff: {tmp_path / name}")
    assert not (tmp_path / "cache").exists()


def test_nothing_is_collected_at_the_end_of_the_process(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would take seconds."""
    last, frozen = list[Any](), list[bool]()
    monkeypatch.setattr("atexit.register", last.append)
    monkeypatch.setattr("qoff.serve.server.serve", lambda *_: None)
    found = CliRunner().invoke(app, ["serve", str(checkpoint), "--files", str(tmp_path)])
    assert found.exit_code == 0
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(True))
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    for call in last:
        call()
    assert frozen == [True]


@pytest.mark.slow
def test_a_signal_ends_the_command_with_its_status(checkpoint: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "qoff", "serve", str(checkpoint), "--port", "0"]
    command += ["--files", str(tmp_path)]
    process = subprocess.Popen(
        [*command, "--context", "96"], stderr=subprocess.PIPE, env={**os.environ, "NO_COLOR": "1"}
    )
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(json.loads(line))
        if lines[-1]["event"].startswith("compiling"):
            lines.pop()
        elif lines[-1]["event"] == "ready":
            break
    process.terminate()
    rest = process.stderr.read().splitlines()
    assert process.wait(20) == 143
    lines += map(json.loads, rest)
    assert [line["event"] for line in lines[:3]] == ["loading", "ready", "stopping"]
