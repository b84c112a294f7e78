"""Bytes at the peak beside those that were counted, and a cgroup that kills what takes more.

A process of its own opens each plan in a memory cgroup (v1, as root) three times: to compile, for
the peak, and with a limit. Requests fill what a plan has room for, and ask for what takes most:
drawn tokens, penalties and log-probabilities. What was there before (Python, libraries, compiled
kernels) does not count, and its tokenizer is measured: an object of a library, as large as a
vocabulary makes it. The limit is what the group has, the tokenizer, and 1 % more than the plan's
bytes of device and host memory. It counts what the kernel takes for the process, too, and pages of
files as far as they cannot be dropped; code has room.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from bench.control_group import control_group
from bench.demo import fetch_checkpoint
from bench.harness import Bar, Report
from bench.offload import Work
from bench.offload import plans as plans_by_hand
from qoff.checkpoint import Checkpoint
from qoff.engine import LLM, SamplingParams
from qoff.errors import ArgumentError, BudgetError, QoffError
from qoff.hf.load import load_tokenizer
from qoff.plan import Plan
from qoff.plan.machine import assumed_profile
from qoff.plan.saved import plan_text, read_plan
from qoff.plan.search import find_plan
from qoff.plan.sizes import ModelSizes
from qoff.plan.workload import Lengths, Workload
from qoff.system_memory import return_freed

_OVER = 0.01  # of a plan's bytes
_MIB = 1 << 20


class Ran(NamedTuple):
    """Bytes that a plan counts, at the peak, and of the tokenizer; whether a limit killed it."""

    counted: int
    peak: int
    tokenizer: int
    killed: bool

    @property
    def over(self) -> float:
        """The part of what is counted that is taken beyond it."""
        return (self.peak - self.tokenizer) / self.counted - 1


def measure(quick: bool, plans: Sequence[str] = ()) -> Report:
    """The planner's plans for some budgets, and those of `bench.offload`.

    plans: words in the labels of those that are run; none: all of them.
    """
    result = Report(
        "planner-budgets",
        {"quick": quick},
        "main memory: bytes counted, and at the peak of a process that is killed beyond them",
        ("plan", "counted MiB", "tokenizer MiB", "at the peak MiB", "beyond both", "killed"),
    )
    # Prompts fill passes of 512 tokens; in the end 127 tokens of each sequence are not packed, as
    # many as there is room for.
    path, work = fetch_checkpoint(), Work(4, 2, 128 if quick else 256, 63)
    found = {
        label: _run(path, plan, work)
        for label, plan in _plans(path, work, quick).items()
        if not plans or any(word in label for word in plans)
    }
    if not found:
        raise ArgumentError(f"no plan is called {' or '.join(plans)}")
    for label, one in found.items():
        mib = [f"{n / _MIB:.1f}" for n in (one.counted, one.tokenizer, one.peak)]
        result.rows.append((label, *mib, f"{one.over:+.1%}", "yes" if one.killed else "no"))
        result.measured[label] = one._asdict()
    killed, over = (max(getattr(x, n) for x in found.values()) for n in ("killed", "over"))
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
    by_hand = plans_by_hand(path, work, "cpu")
    return found | dict(list(by_hand.items())[: 2 if quick else None])


def _run(path: Path, plan: Plan, work: Work) -> Ran:
    """What a process in a cgroup of its own takes."""
    with control_group(None) as group, tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(plan_text(plan))
        file.flush()
        numbers = [str(n) for n in (work.batch_size * work.batches, work.prompt, work.new)]
        command = [sys.executable, "-m", __name__, str(path), file.name, str(group.folder)]
        done = subprocess.run(
            [*command, *numbers],
            capture_output=True,
            text=True,
            check=False,
            preexec_fn=group.join,
        )
        control = (group.folder / "memory.oom_control").read_text().splitlines()
    killed = "oom_kill 0" not in control
    if done.returncode and not (killed and done.stdout):
        raise QoffError(f"the plan's process failed: {done.stderr[-500:]}")
    counted, peak, tokenizer = json.loads(done.stdout.splitlines()[-1])
    return Ran(counted, peak, tokenizer, killed)


def _child(argv: Sequence[str] | None = None) -> None:
    """Open a plan in a cgroup and answer; prints the first three numbers of `Ran`."""
    parser = argparse.ArgumentParser()
    for name in ("path", "plan", "group"):
        parser.add_argument(name, type=Path)
    for name in ("count", "prompt", "new"):
        parser.add_argument(name, type=int)
    args = parser.parse_args(argv)
    group, plan = args.group, replace(read_plan(args.plan), adapt=False)
    prompts = [torch.randint(1000, (args.prompt,)).tolist() for _ in range(args.count)]

    def answer(new: int) -> int:
        params = SamplingParams(
            top_p=0.9, repetition_penalty=1.1, logprobs=5, seed=1, max_tokens=new, ignore_eos=True
        )
        with LLM(args.path, plan, device="cpu") as llm:
            llm.generate(prompts, params)
            tiers = llm.memory_by_tier()
            return sum(sum(tiers[tier].values()) for tier in ("device", "host"))

    counted = answer(2)  # compiles, and allocates what a process keeps
    own = tokenizer_bytes(args.path)
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    answer(args.new)
    print(json.dumps([counted, _status("VmHWM") - before, own]), flush=True)
    trim()
    usage = int((group / "memory.usage_in_bytes").read_text())
    lines = (group / "memory.stat").read_text().splitlines()
    stat = {name: int(value) for name, value in map(str.split, lines)}
    usage -= stat["cache"] - stat["mapped_file"]  # pages of files, but for code
    limit = usage + own + int(counted * (1 + _OVER))
    (group / "memory.limit_in_bytes").write_text(str(limit))
    answer(args.new)


def tokenizer_bytes(path: Path) -> int:
    """What a checkpoint's tokenizer keeps; memory that was freed is given back.

    The first of three may find some that could not be.
    """
    trim()
    kept, found = list[object](), list[int]()
    for _ in range(3):
        before = _status("VmRSS")
        kept.append(load_tokenizer(path))
        found.append(_status("VmRSS") - before)
    kept.clear()
    trim()
    return max(found)


def _status(name: str) -> int:
    """Bytes of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(x.split()[1]) for x in lines if x.startswith(f"{name}:"))


def trim() -> None:
    """Give memory back that is freed, or garbage."""
    gc.collect()
    return_freed()


if __name__ == "__main__":
    _child()
