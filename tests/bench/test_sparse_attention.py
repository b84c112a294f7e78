"""The bench of sparse attention runs and writes what it found. No time is asserted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench import sparse_attention
from bench.sparse_attention import CHOICE, DENSE, Shape, calls
from tests.tiny_models import tiny_checkpoint


def test_the_bench_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "found.json"
    sparse_attention.main(["--quick", "--out", str(path)])
    found = json.loads(path.read_text())
    assert set(found["measured"]["1024, D 64, GQA 3"]) == {DENSE, "top 0.25", "top 0.1", CHOICE}
    assert "0.1 / dense" in capsys.readouterr().out


def test_every_call_takes_other_blocks() -> None:
    ways = calls(Shape(256, 64, 1), 1 << 20)
    first, second = (ways["top 0.25"]() for _ in range(2))
    assert isinstance(first, torch.Tensor)
    assert not torch.equal(first, second)


def test_losses_of_the_same_prompt(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = tiny_checkpoint(tmp_path_factory.getbasetemp(), "llama-head64")
    monkeypatch.setattr(sparse_attention, "fetch_checkpoint", lambda: checkpoint)
    monkeypatch.setattr(
        sparse_attention,
        "prose",
        lambda _, tokens, count: torch.arange(tokens * count).view(count, -1) % 60,
    )
    with torch.inference_mode():
        found = sparse_attention.likelihood(400, 6, 2)
    assert [name for name in found if name.endswith("top 1.0")] == [
        "0 sinks, top 1.0",
        "64 sinks, top 1.0",
    ]
    assert found["0 sinks, top 1.0"]["more"] == 0
    assert found["0 sinks, top 0.1"]["nll"] != found["0 sinks, top 1.0"]["nll"]
    assert abs(found["0 sinks, top 0.1"]["more"]) < 1
