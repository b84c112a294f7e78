"""The bench of what a layer costs the host, on two small models; no time is asserted."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from bench import launches
from tests.programs import printed

ROOT = Path(__file__).resolve().parents[2]


def test_an_interpreter_launches_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert launches.main(["--out", str(tmp_path / "x.json")]) == 2
    assert "TRITON_INTERPRET" in capsys.readouterr().err


def test_the_launches_of_a_layer_are_counted(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = ("-m", "bench.launches", "--quick", "--out", tmp_path / "x.json")
    printed(*command, cwd=ROOT, env=env, timeout=300)
    (measured,) = json.loads((tmp_path / "x.json").read_text())["measured"].values()
    assert measured["triton"]["decode_attention_kernel"] == 1
    assert measured["triton_launches"] <= 8
    assert measured["torch_launches"] == 0
    first, *later = measured["attention_compiled_by_context"].values()
    assert first == 3  # attention, merge, packing of a block
    assert not any(later)
    assert measured["triton_launches"] == sum(measured["triton"].values())
    assert measured["torch_launches"] == sum(measured["torch"].values())
    assert measured["replayed_step_us"] > 0
