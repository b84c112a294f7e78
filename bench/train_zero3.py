"""DeepSpeed's ZeRO-3 with everything on disk, beside `bench.train_large full`.

The same model and batches, in a control group of the same limit, and of larger ones where it is
killed in that. One that takes too long is ended, and counts with the seconds that it had.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from typing import Any

import torch
from torch import Tensor

from bench.control_group import control_group, forget
from bench.harness import Bar, Report
from bench.peers import packages
from qoff.errors import ArgumentError
from qoff.units import format_size, parse_size

_WORKER = (sys.executable, "-m", "bench.peers.deepspeed_zero")
_NAME = "DeepSpeed ZeRO-3"
_KILLED = -9


def zero3(given: argparse.Namespace, batches: list[dict[str, Tensor]], result: Report) -> None:
    """Measure it, and add to a report whose steps are measured.

    given: of `bench.train_large`. Raises ArgumentError where DeepSpeed fails otherwise than by a
    limit of memory or time.
    """
    if packages.folder("deepspeed") is None:
        result.notes.append(f"no {_NAME}: `python -m bench.peers deepspeed` installs it")
        return
    subprocess.run([*_WORKER, "build"], check=True, stdout=subprocess.DEVNULL)
    states = given.path / "zero3"
    torch.save(torch.stack([x["input_ids"] for x in batches]), given.path / "batches.pt")
    work = {
        "model": str(given.path / "float"),
        "batches": str(given.path / "batches.pt"),
        "states": str(states),
        "steps": given.steps,
    }
    end = time.monotonic() + 60 * given.peer_minutes
    for limit in (given.limit, *given.peer_limits):
        forget(given.path / "float")
        try:
            found = _attempt([*_WORKER, json.dumps(work)], limit, max(1.0, end - time.monotonic()))
        finally:
            shutil.rmtree(states, ignore_errors=True)
        result.measured[f"{_NAME}, {limit}"] = found
        if not found["killed"]:
            break
        result.notes.append(f"{_NAME} was killed in {limit}")
    report(found, limit, given.tokens * given.micro_batches, result)


def _attempt(command: list[str], limit: str, seconds: float) -> dict[str, Any]:
    """What a worker's last line says; killed: by its limit; unfinished_s: of a step, at the end."""
    with control_group(parse_size(limit)) as group:
        try:
            done = group.run(command, seconds)
            status, lines = done.returncode, done.stdout
        except subprocess.TimeoutExpired as late:
            status, lines = None, (late.stdout or b"").decode()
        now, peak = time.time(), group.peak
        killed = status == _KILLED and peak >= parse_size(limit)
        if status and not killed:
            raise ArgumentError(f"{_NAME}: exit status {status}: {done.stderr[-2000:]}")
        found: dict[str, Any] = json.loads(lines.strip().rpartition("\n")[2] or '{"seconds": []}')
        if status is None:
            found["unfinished_s"] = now - found.get("at", now - seconds)
        return found | {"killed": killed, "peak": peak}


def report(found: dict[str, Any], limit: str, tokens: int, result: Report) -> None:
    """Add rows and a ratio. The first step has few tokens, so only those after it count."""
    name = f"{_NAME}, in {limit}"
    if found["killed"]:
        result.rows.append((name, "killed", ""))
        return
    steps = found["seconds"][1:]
    if not found["seconds"]:
        result.rows.append((name, f"no step in {found['unfinished_s']:.0f} s", ""))
        return
    seconds = min(steps) if steps else found["unfinished_s"]
    more, less = ("", "") if steps else ("more than ", "less than ")
    result.rows += [
        (name, f"{more}{seconds:.1f} s", f"{less}{tokens / seconds:.1f} tokens/s"),
        ("  memory at its peak", format_size(found["peak"]), f"of {limit}"),
    ]
    ratio = seconds / min(result.measured["step"]["seconds"])
    result.ratios[f"over {_NAME}"] = ratio
    result.bars.append(Bar(f"full training over {_NAME}", 1.0, ratio))
