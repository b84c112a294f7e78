"""A few kills of a batch job."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.programs import printed

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_killed_jobs_lose_nothing(tmp_path: Path) -> None:
    """In a process of its own, which forks."""
    options = ("--quick", "--seed", 3, "--out", tmp_path / "out.json")
    said = printed("-m", "bench.batch_kills", *options, cwd=ROOT, timeout=200)
    assert "met: kills survived" in said
