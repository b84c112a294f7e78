"""Jobs of the tests: a file of requests in a folder, and its answers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from qoff.engine import SamplingParams
from qoff.jobs.file import Asked, FileJob
from qoff.plan import Plan

PLAN = Plan(batch_size=4, context=100, prefill_tokens=64)
PARAMS = SamplingParams(temperature=0, max_tokens=4)


def file_job(
    tmp_path: Path, checkpoint: Path | None = None, plan: Plan = PLAN, overwrite: bool = False,
    **more: Any,
) -> FileJob:  # fmt: skip
    """On `in.jsonl`. checkpoint: None for one that nothing is read of."""
    asked = Asked(
        tmp_path / "in.jsonl", tmp_path / "out.jsonl", None, "tiny", PARAMS, True, False, False
    )
    if checkpoint is None:
        (checkpoint := tmp_path / "model").mkdir(exist_ok=True)
    return FileJob(replace(asked, **more), checkpoint, plan, overwrite=overwrite)


def line(number: int, prompt: Any = "abc", **body: Any) -> str:
    body = {"prompt": prompt, "max_tokens": 1 + number % 5, "temperature": 0, **body}
    said = {"custom_id": f"id {number}", "method": "POST", "url": "/v1/completions"}
    return json.dumps({**said, "body": body})


def write(tmp_path: Path, *lines: str) -> None:
    (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()]
