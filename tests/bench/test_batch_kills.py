"""A few kills of a batch job."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_killed_jobs_lose_nothing(tmp_path: Path) -> None:
    """In a process of its own, which forks."""
    options = ["--quick", "--seed", "3", "--out", str(tmp_path / "out.json")]
    run = subprocess.run(
        [sys.executable, "-m", "bench.batch_kills", *options],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=200,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert "met: kills survived" in run.stdout
