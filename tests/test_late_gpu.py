"""Tests of a GPU's host code on one that is simulated: work is done as late as it may be.

A process has this GPU or none, so they run in one of their own. `make late-gpu` runs all of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real one")

ENGINE = "tests/engine/test_llm_device.py::test_the_answers_do_not_depend_on_the_plan"
DRAFTS = "tests/engine/test_drafts_device.py::test_a_small_model_drafts_and_changes_no_token"
PASSING = "tests/models/test_passing_experts.py"
SOME = {
    "late": ["tests/late_gpu", f"{ENGINE}[gpu-disk]", f"{DRAFTS}[gpu-host]"],
    "early": [
        "tests/late_gpu",
        f"{ENGINE}[gpu-moved-disk-streaming]",
        f"{PASSING}::test_codes_that_the_device_widens_pass_as_they_stream[cuda-6]",
    ],
}


@pytest.mark.parametrize("copies", SOME)
def test_nothing_is_used_before_it_is_there(copies: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-x", "-m", "gpu", *SOME[copies]]
    command += ["--basetemp", str(tmp_path / "base"), "-p", "no:cacheprovider"]
    done = subprocess.run(
        command,
        cwd=Path(__file__).parents[1],
        env={**os.environ, "QOFF_LATE_GPU": copies},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert "skipped" not in done.stdout.splitlines()[-1]
