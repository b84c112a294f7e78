"""bench.lm_eval makes tasks, and refuses scores that are not equal."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import lm_eval
from bench.lm_eval import Run, differences, farthest, make_tasks
from qoff.errors import ArgumentError, QoffError
from tests.tiny_models import tiny_checkpoint

TEXT = " ".join(f"w{number}" for number in range(400))
SCORED = Run({"acc": 0.5}, [[(-3.0, True), (-4.0, False)], [(-5.0, False), (-1.0, True)]], 2.0, 1.0)
SAID = Run({"exact_match": 0.0}, [["a"], ["b"], ["c"]], 2.0, 1.0)


def test_tasks_have_one_right_ending(tmp_path: Path) -> None:
    make_tasks(tmp_path, 9, TEXT)
    documents = [json.loads(line) for line in (tmp_path / "passages.jsonl").open()]
    assert len(documents) == 9
    for one in documents:
        assert one["endings"][one["right"]] == one["ending"]
        assert f"{one['passage']} {one['ending']}" in TEXT
    assert len({one["right"] for one in documents}) > 1
    again = tmp_path / "again"
    again.mkdir()
    make_tasks(again, 9, TEXT)
    assert [json.loads(line) for line in (again / "passages.jsonl").open()] == documents


@pytest.mark.parametrize(("count", "text"), [(0, TEXT), (3, "a few words")])
def test_too_little_text_is_refused(count: int, text: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="words"):
        make_tasks(tmp_path, count, text)


@pytest.mark.parametrize(
    ("run", "changed", "equal"),
    [
        (SCORED, {}, True),
        (SCORED, {"seconds": 9.0, "swept": 7.0}, True),
        (SCORED, {"samples": [[(-3.00009, True), (-4.0, False)], SCORED.samples[1]]}, True),
        (SCORED, {"samples": [[(-3.001, True), (-4.0, False)], SCORED.samples[1]]}, False),
        (SCORED, {"samples": [[(-3.0, False), (-4.0, False)], SCORED.samples[1]]}, False),
        (SCORED, {"metrics": {"acc": 0.75}}, False),
        (SAID, {}, True),
        (SAID, {"samples": [["a"], ["b"], ["c "]]}, False),
    ],
)
def test_what_is_equal(run: Run, changed: dict[str, Any], equal: bool) -> None:
    assert (differences(run, replace(run, **changed)) == []) is equal


def test_samples_per_second_and_the_largest_difference() -> None:
    assert SAID.rate == 1.5
    other = replace(SCORED, samples=[[(-3.5, True), (-4.0, False)], SCORED.samples[1]])
    assert farthest(SCORED, other) == pytest.approx(0.5)
    assert farthest(SAID, SAID) == 0


def test_without_the_harness_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "lm_eval", None)
    with pytest.raises(QoffError, match=r"needs lm_eval, .*pip install 'qoff\[eval\]'") as refusal:
        lm_eval.main(["--quick"])
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("other", [False, True])
def test_both_ways_are_measured_and_unequal_scores_end_with_status_1(
    other: bool, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path_factory.mktemp("lm_eval")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", folder / "datasets")
    monkeypatch.setattr(lm_eval, "_BATCHES", (2, 1))
    monkeypatch.setattr(lm_eval, "_LENGTH", 128)  # a tiny model's tokens are characters
    if other:
        monkeypatch.setattr(lm_eval, "differences", lambda a, b: ["document 0: 'a' and 'b'"])
    checkpoint = tiny_checkpoint(tmp_path_factory.getbasetemp(), "llama")
    out = folder / "out.json"
    asked = ["--quick", "--model", str(checkpoint), "--memory", "40", "--out", str(out)]
    if other:
        with pytest.raises(SystemExit) as ended:
            lm_eval.main(asked)
        assert ended.value.code == 1
    else:
        lm_eval.main(asked)
    found = json.loads(out.read_text())
    assert any("NOT EQUAL" in note for note in found["notes"]) is other
    for task in lm_eval.TASKS:
        assert found["ratios"][f"{task}, qoff over hf, batch 1"] > 0
    assert found["measured"]["bench_answers, qoff"]["samples_per_s"][0] > 0
