"""The benches of training run on small sizes, and write their figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import train, train_steps


def test_optimizers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = train.measured(1 << 12, 1)
    assert all(seconds > 0 for _, seconds in found.values())
    monkeypatch.setattr(train, "measured", lambda n, rounds: found)
    train.main(["--quick", "--out", str(tmp_path / "out.json")])
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["measured"].keys() == found.keys()


def test_only_whole_kinds_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train_steps.main(["--quick", "--only", "all weights, qoff"])
    assert "use all or adapters" in capsys.readouterr().err


def test_steps(tmp_path: Path) -> None:
    train_steps.main(["--quick", "--only", "all", "--out", str(tmp_path / "out.json")])
    written = json.loads((tmp_path / "out.json").read_text())
    assert len(written["bars"]) == 1
    assert all(rate > 0 for rate in written["measured"].values())
