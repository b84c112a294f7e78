"""Bytes at the peak beside those that were counted, and a cgroup that kills what takes more.

A process of its own opens each plan in a memory cgroup (v1, as root), twice: without a limit, for
the peak, and with one. What it takes before, with libraries and compiled kernels, is measured; the
limit is that, the plan's bytes of device and host memory, 1 %, and 8 MiB for what an open LLM has
beside (tokenizer, stacks of threads). Files are read around the page cache.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from bench.demo import fetch_checkpoint
from bench.harness import Bar, Report
from bench.offload import Work, plans
from qoff.checkpoint import Checkpoint
from qoff.engine import LLM, SamplingParams
from qoff.errors import BudgetError, QoffError
from qoff.plan import Plan
from qoff.plan.machine import assumed_profile
from qoff.plan.saved import plan_text, read_plan
from qoff.plan.search import find_plan
from qoff.plan.sizes import ModelSizes
from qoff.plan.workload import Lengths, Workload

_ROOT = Path("/sys/fs/cgroup/memory")
_OVER = 0.01  # of a plan's bytes
_MIB = 1 << 20
PROCESS = 8 * _MIB  # tokenizer, threads' stacks, Python's own: not a plan's


@contextmanager
def cgroup() -> Iterator[Path]:
    """A memory cgroup of v1. Raises QoffError where none can be made."""
    folder = _ROOT / f"qoff-planner-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        raise QoffError(f"{folder}: {error.strerror}; this needs cgroups v1, as root") from error
    try:
        yield folder
    finally:
        folder.rmdir()


def measure(quick: bool) -> Report:
    """The planner's plans for some budgets, and those of `bench.offload`."""
    result = Report(
        "planner-budgets",
        {"quick": quick},
        "main memory: bytes counted, and at the peak of a process that is killed beyond them",
        ("plan", "counted MiB", "at the peak MiB", "of it", "killed"),
    )
    path, work = fetch_checkpoint(), Work(4, 2, 128, 8) if quick else Work(4, 2, 256, 32)
    killed, over = 0, 0.0
    for label, plan in _plans(path, work, quick).items():
        counted, peak, ended = _run(path, plan, work)
        killed += ended
        over = max(over, (peak - PROCESS) / counted - 1)
        mib = f"{counted / _MIB:.1f}", f"{peak / _MIB:.1f}"
        result.rows.append((label, *mib, f"{peak / counted:.1%}", "yes" if ended else "no"))
        result.measured[label] = {"counted": counted, "peak": peak, "killed": ended}
    result.bars.append(Bar("plans that are not killed", 1, float(not killed)))
    result.bars.append(Bar("1 - largest excess over what is counted", 1 - _OVER, 1 - over))
    return result


def _plans(path: Path, work: Work, quick: bool) -> dict[str, Plan]:
    found = dict[str, Plan]()
    sizes = ModelSizes.of_checkpoint(Checkpoint.open(path))
    folder = Path(tempfile.gettempdir())
    machine = assumed_profile(torch.device("cpu"), folder)
    count = work.batch_size * work.batches
    asked = Workload(Lengths.of(work.prompt), Lengths.of(work.new), count)
    for budget in (96,) if quick else (64, 96, 160):
        there = machine.with_memory(device=budget * _MIB, host=0)
        try:
            found[f"the planner's, {budget} MiB"] = find_plan(sizes, there, asked).plan
        except BudgetError:
            continue
    by_hand = plans(path, work, "cpu")
    return found | dict(list(by_hand.items())[: 2 if quick else None])


def _run(path: Path, plan: Plan, work: Work) -> tuple[int, int, bool]:
    """Bytes counted and at the peak of a process, and whether a limit killed it."""
    with cgroup() as group, tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(plan_text(plan))
        file.flush()
        numbers = [str(n) for n in (work.batch_size * work.batches, work.prompt, work.new)]
        command = [sys.executable, "-m", __name__, str(path), file.name, str(group), *numbers]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    killed = done.returncode == -signal.SIGKILL
    if not done.stdout or (done.returncode and not killed):
        raise QoffError(f"the plan's process failed: {done.stderr[-500:]}")
    counted, peak = json.loads(done.stdout.splitlines()[-1])
    return counted, peak, killed


def _child(argv: Sequence[str] | None = None) -> None:
    """Open a plan in a cgroup and answer; prints bytes counted and at the peak."""
    parser = argparse.ArgumentParser()
    for name in ("path", "plan", "group"):
        parser.add_argument(name, type=Path)
    for name in ("count", "prompt", "new"):
        parser.add_argument(name, type=int)
    args = parser.parse_args(argv)
    group, plan = args.group, read_plan(args.plan)
    (group / "cgroup.procs").write_text(str(os.getpid()))
    prompts = torch.randint(1000, (args.count, args.prompt)).tolist()
    params = SamplingParams(temperature=0, max_tokens=args.new, ignore_eos=True)

    def answer(one: Plan) -> int:
        with LLM(args.path, replace(one, adapt=False), device="cpu") as llm:
            llm.generate(prompts, params)
            tiers = llm.memory_by_tier()
            return sum(sum(tiers[tier].values()) for tier in ("device", "host"))

    counted = answer(plan)  # compiles, and allocates what a process keeps
    trim()
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    answer(plan)
    print(json.dumps([counted, _status("VmHWM") - before]), flush=True)
    trim()
    (group / "memory.force_empty").write_text("0")  # of pages of files
    limit = int((group / "memory.usage_in_bytes").read_text()) + int(counted * (1 + _OVER))
    limit += PROCESS
    (group / "memory.limit_in_bytes").write_text(str(limit))
    answer(plan)
    (_ROOT / "cgroup.procs").write_text(str(os.getpid()))


def _status(name: str) -> int:
    """Bytes of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(x.split()[1]) for x in lines if x.startswith(f"{name}:"))


def trim() -> None:
    """Give freed memory back to the system."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)


if __name__ == "__main__":
    _child()
