"""bench.serve asks a server, and says what its clients saw."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from bench import serve
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
        url = ["--url", served.url, "--model", MODEL]
        serve.main([*url, "--quick", "--clients", "1,3", "--out", str(out)])
        with pytest.raises(QoffError, match="404"):
            asyncio.run(serve.ask(served.url, "other", "a"))
    measured = json.loads(out.read_text())["measured"]
    assert measured.keys() == {"1", "3"}
    for found in measured.values():
        assert found["tok/s"] > 0
        assert 0 < found["itl_p50_ms"] <= found["itl_p99_ms"]


def test_a_summary_is_of_all_streams() -> None:
    streams = [serve.Stream(0.0, (0.1, 0.2, 0.4), 3), serve.Stream(1.0, (1.3,), 1)]
    found = serve.summary(streams, 2.0)
    assert found["tok/s"] == 2
    assert found["ttft_p50_ms"] == pytest.approx(200)
    assert found["itl_p50_ms"] == pytest.approx(150)
