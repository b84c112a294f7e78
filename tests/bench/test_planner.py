"""bench.planner predicts every plan that it measures. No time is asserted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import planner
from tests.plan.machines import machine
from tests.tiny_models import tiny_checkpoint


def test_every_plan_is_measured_and_predicted(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_checkpoint(tmp_path_factory.getbasetemp(), "llama-head64-deep")
    monkeypatch.setattr(planner, "fetch_checkpoint", lambda: path)
    monkeypatch.setattr(planner, "measured_profile", lambda *_: machine())
    out = tmp_path / "found.json"
    planner.main(["--quick", "--out", str(out)])
    content = json.loads(out.read_text())
    found = content["measured"]
    assert len(found) + sum("refused" in note for note in content["notes"]) == 10
    resident, half = found["135M: all resident"], found["135M: 50% of the weights"]
    assert resident["busy_s"]["disk read"] == 0
    assert half["busy_s"]["disk read"] > 0
    twice = found["135M: 50%, sequential"]["busy_s"]["disk read"]
    assert twice == pytest.approx(2 * half["busy_s"]["disk read"])
    assert half["predicted_s"] > resident["predicted_s"]
