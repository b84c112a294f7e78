"""bench.offload measures every plan, and says which bytes they moved. No time is asserted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import offload
from tests.tiny_models import tiny_checkpoint


def test_every_plan_is_measured_and_drawn(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_checkpoint(tmp_path_factory.getbasetemp(), "llama-head64-deep")
    monkeypatch.setattr(offload, "fetch_checkpoint", lambda: path)
    out = tmp_path / "found.json"
    offload.main(["--quick", "--plot", "--out", str(out)])
    content = json.loads(out.read_text())
    found = content["measured"]
    refused = [note for note in content["notes"] if "refused" in note]
    assert len(found) + len(refused) == 10
    assert all("%" in note for note in refused)  # what is left takes tiles
    resident, half = found["135M: all resident"], found["135M: 50% of the weights"]
    assert (resident["disk_bytes"], resident["limit"]) == (0, "compute")
    assert half["disk_bytes"] > 0
    assert half["device_bytes"] < resident["device_bytes"]
    rows = found["135M: 50%, sequential"]["disk_bytes"]
    assert 1.3 < rows / half["disk_bytes"] < 3  # once for each of two batches
    assert found["135M: 50%, the rest in host memory"]["disk_bytes"] == 0
    assert found["135M: KV on disk"]["disk_bytes"] > 0
    assert {p.suffix for p in tmp_path.iterdir()} == {".json", ".svg"}
