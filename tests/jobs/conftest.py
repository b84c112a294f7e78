"""The model of the server's tests, and jobs of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from qoff.engine import LLM
from qoff.plan import Plan
from tests.jobs.file_jobs import PLAN, file_job
from tests.serve.conftest import checkpoint

__all__ = ["checkpoint"]


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    with LLM(checkpoint, PLAN) as found:
        yield found


@pytest.fixture
def job(llm: LLM, checkpoint: Path, tmp_path: Path) -> Callable[..., int]:
    """Run the job on `in.jsonl`; how many requests have failed."""

    def run(overwrite: bool = False, plan: Plan = PLAN, **more: Any) -> int:
        with file_job(tmp_path, checkpoint, plan, overwrite, **more) as opened:
            if opened.left != 0:  # None: nobody knows
                opened.run(llm, lambda _: None)
            return opened.finish()

    return run
