"""What DeepSpeed's steps come to in a report, finished or not."""

from __future__ import annotations

from typing import Any

import pytest

from bench.harness import Report
from bench.train_zero3 import report


def reported(found: dict[str, Any]) -> Report:
    made = Report("x", {}, "x", ("", "", ""))
    made.measured["step"] = {"seconds": [20.0, 10.0]}
    report({"killed": False, "peak": 1 << 30} | found, "3GiB", 100, made)
    return made


def test_the_first_step_does_not_count() -> None:
    made = reported({"seconds": [1.0, 40.0, 30.0]})
    assert made.rows[0] == ("DeepSpeed ZeRO-3, in 3GiB", "30.0 s", "3.3 tokens/s")
    assert made.ratios == {"over DeepSpeed ZeRO-3": 3.0}


def test_a_step_that_was_ended_counts_with_what_it_had() -> None:
    made = reported({"seconds": [1.0], "unfinished_s": 50.0})
    assert made.rows[0][1:] == ("more than 50.0 s", "less than 2.0 tokens/s")
    assert made.ratios == {"over DeepSpeed ZeRO-3": 5.0}


@pytest.mark.parametrize(
    ("found", "said"),
    [({"killed": True, "seconds": []}, "killed"),
     ({"seconds": [], "unfinished_s": 9.0}, "no step in 9 s")],
)  # fmt: skip
def test_no_ratio_without_a_step(found: dict[str, Any], said: str) -> None:
    made = reported(found)
    assert [row[1] for row in made.rows] == [said]
    assert not made.ratios
    assert not made.bars
