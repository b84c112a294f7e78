"""The benches of training run on small sizes, and write their figures."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from bench import (
    control_group,
    train,
    train_bound,
    train_curves,
    train_large,
    train_precision,
    train_steps,
    train_zero3,
)
from bench.harness import Report
from qoff.errors import ArgumentError
from tests.tiny_models import tiny_checkpoint


def test_optimizers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train.packages, "folder", lambda name: None)  # it would be built
    found = train.contestants(1 << 12)
    monkeypatch.setattr(train, "contestants", lambda n: found)
    train.main(["--quick", "--out", str(tmp_path / "out.json")])
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["measured"].keys() == found.keys()
    assert all(one["fastest"] >= one["rate"] > 0 for one in written["measured"].values())


def test_precisions(tmp_path: Path) -> None:
    train_precision.main(["--quick", "--micro-batches", "2", "--out", str(tmp_path / "out.json")])
    written = json.loads((tmp_path / "out.json").read_text())
    assert len(written["measured"]) == 1 + len(train_precision.KINDS)
    assert written["bars"][0]["met"]


def test_only_whole_kinds_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train_steps.main(["--quick", "--only", "all weights, qoff"])
    assert "use all or adapters" in capsys.readouterr().err


def test_steps(tmp_path: Path) -> None:
    train_steps.main(["--quick", "--only", "all", "--out", str(tmp_path / "out.json")])
    written = json.loads((tmp_path / "out.json").read_text())
    assert len(written["bars"]) == 1
    assert all(rate > 0 for rate in written["measured"].values())


@pytest.mark.parametrize("what", ["full", "adapters", "tiles"])
def test_a_large_model(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_bound, "_PROBE", 64 << 20)
    sizes = ["--quick", "--layers", "1", "--tokens", "16", "--path", str(tmp_path)]
    given = train_large.parser().parse_args([what, *sizes, "--limit", "1GiB"])
    config = train_large.shape(given)
    train_large.write(given, config)
    report = Report("train_large", {}, "", ("", "", ""))

    def run(limit: int | None, part: str, *more: str) -> dict[str, object]:
        """A part, in this process."""
        if part == "bound":
            return train_bound.bound(config, 16, 1, json.loads(more[1]), tmp_path)
        given.in_memory = "--in-memory" in more
        return train_large.trained(given, config) | {"peak": limit}

    train_large.KINDS[what](given, run, report)
    assert report.bars[0].measured > 0
    on_disk = report.measured["from disk, in 1GiB" if what == "adapters" else "step"]
    read = "frozen weights read" if what == "adapters" else "states read"
    if what == "tiles":
        assert all(bar.met for bar in report.bars[:1])
        assert on_disk["moved"]["gradients read"] > 0
    assert on_disk["moved"][read] > 0
    assert on_disk["device"] > on_disk["host"] == 0


def test_a_control_group_that_cannot_be_bounded_is_not_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, text: str) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(control_group, "_GROUPS", tmp_path)
    monkeypatch.setattr(Path, "write_text", refuse)
    with (
        pytest.raises(ArgumentError, match="Permission denied; this needs cgroup v1 and root"),
        control_group.control_group(1 << 30),
    ):
        pass
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("script", "seconds", "killed", "row"),
    [
        ("echo '{\"seconds\": [1, 30, 20]}'", 9.0, False, "20.0 s"),
        ("echo '{\"seconds\": []}'; kill -9 $$", 9.0, True, "killed"),
        ('echo \'{"seconds": [1], "at": 0}\'; exec sleep 9', 0.2, False, "more than "),
        ("exec sleep 9", 0.2, False, "no step in 0 s"),
    ],
)
def test_a_peer_that_is_killed_or_too_slow_is_reported(
    script: str,
    seconds: float,
    killed: bool,
    row: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = control_group.ControlGroup(tmp_path)
    monkeypatch.setattr(train_zero3, "control_group", lambda limit: nullcontext(group))
    (tmp_path / "memory.max_usage_in_bytes").write_text(str(1 << 30))
    found = train_zero3._attempt(["sh", "-c", script], "1GiB", seconds)
    assert found["killed"] == killed
    report = Report("name", {}, "", ("", "", ""), measured={"step": {"seconds": [10.0]}})
    train_zero3.report(found, "1GiB", 100, report)
    assert report.rows[0][1].startswith(row)
    assert len(report.bars) == (len(found["seconds"]) > 0)


def test_a_peer_that_is_killed_below_its_limit_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a machine that has too little memory."""
    group = control_group.ControlGroup(tmp_path)
    monkeypatch.setattr(train_zero3, "control_group", lambda limit: nullcontext(group))
    (tmp_path / "memory.max_usage_in_bytes").write_text("1000")
    with pytest.raises(ArgumentError, match="exit status -9"):
        train_zero3._attempt(["sh", "-c", "kill -9 $$"], "1GiB", 9.0)


def test_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a tiny model, whose tokenizer knows few words."""
    path = tiny_checkpoint(tmp_path, "llama")
    ids = torch.randint(3, 100, (500,), generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(train_curves, "load_tokenizer", lambda path: None)
    monkeypatch.setattr(train_curves, "encode", lambda tokenizer, text: ids)
    train_curves.main(["--quick", "--out", str(tmp_path / "out.json")], path)
    written = json.loads((tmp_path / "out.json").read_text())
    assert len(written["measured"]["qoff"]) == 4
    assert written["bars"][0]["met"]
    assert (tmp_path / "out.svg").read_text().startswith("<?xml")
