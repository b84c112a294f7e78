"""Bytes at the peak beside those that were counted, and a cgroup that kills what takes more.

A process of its own opens each plan in a memory cgroup (v1, as root) three times: to compile, for
the peak, and with a limit, which is set once the plan is open. Requests fill what a plan has room
for: sequences as long as its context in all places, then prompts that are read while other
sequences decode, then vectors of prompts, after which no answer follows. They ask for what takes
most: drawn tokens, penalties and log-probabilities. What was there before (Python, libraries,
compiled kernels) does not count, and the checkpoint has no tokenizer.
The limit is what the group has, and what a plan promises: its bytes of device and host memory, and
`beside_plan` for the process. It counts what the kernel takes for the process, too, and pages of
files as far as they cannot be dropped; code has room.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from bench.control_group import control_group, status_bytes
from bench.demo import fetch_checkpoint
from bench.harness import Bar, Report
from bench.offload import Work
from bench.offload import plans as plans_by_hand
from bench.random_model import TINYLLAMA, write_random_checkpoint
from qoff.checkpoint import Checkpoint
from qoff.engine import LLM, SamplingParams
from qoff.errors import ArgumentError, BudgetError, QoffError
from qoff.hf.tokenizer import load_tokenizer
from qoff.plan import Plan
from qoff.plan.machine import assumed_profile, beside_plan
from qoff.plan.native_sizes import NativeSizes
from qoff.plan.saved import plan_text, read_plan
from qoff.plan.search import find_plan
from qoff.plan.workload import Lengths, Workload
from qoff.system_memory import return_freed

_OVER = 0.01  # of a plan's bytes
_MIB = 1 << 20
_NEW = 16  # tokens of an answer


class Ran(NamedTuple):
    """Bytes that a plan counts, and at the peak; whether a limit killed it."""

    counted: int
    peak: int
    killed: bool

    @property
    def over(self) -> float:
        """The part of what is counted that is taken beyond it; negative: less."""
        return self.peak / self.counted - 1

    @property
    def missed(self) -> int:
        """Bytes by which a plan is off beyond 1 % of what it counts."""
        return max(0, abs(self.peak - self.counted) - int(_OVER * self.counted))


class Case(NamedTuple):
    """A plan of a model."""

    label: str
    path: Path
    plan: Plan


def measure(quick: bool, plans: Sequence[str] = ()) -> Report:
    """The planner's plans for some budgets of two models, and those of `bench.offload`.

    plans: words in the labels of those that are run; none: all of them.
    """
    result = Report(
        "planner-budgets",
        {"quick": quick, "plans": list(plans)},
        "main memory: bytes counted, and at the peak of a process that is killed beyond them",
        ("plan", "counted MiB", "at the peak MiB", "beyond", "beyond MiB", "killed"),
    )
    found = dict[str, Ran]()
    with tempfile.TemporaryDirectory() as name:
        for case in _cases(Path(name), quick):
            if not plans or any(word in case.label for word in plans):
                found[case.label] = _run(case)
    if not found:
        raise ArgumentError(f"no plan is called {' or '.join(plans)}")
    for label, one in found.items():
        mib = [f"{n / _MIB:.1f}" for n in (one.counted, one.peak)]
        more = f"{one.over:+.1%}", f"{(one.peak - one.counted) / _MIB:+.1f}"
        result.rows.append((label, *mib, *more, "yes" if one.killed else "no"))
        result.measured[label] = one._asdict()
    runs = found.values()
    killed, missed = max(x.killed for x in runs), max(x.missed for x in runs)
    result.bars.append(Bar("plans that are not killed", 1, float(not killed)))
    result.bars.append(Bar("1 - MiB that a plan is off beyond 1 %", -3, 1 - missed / _MIB))
    return result


def _cases(folder: Path, quick: bool) -> Iterator[Case]:
    """Plans of the demo model and of a random one of 1.1B parameters."""
    demo, small = folder / "135M", Work(4, 2, 128, 63)
    unread = shutil.ignore_patterns("tokenizer*", "vocab*", "merges*", "special_tokens*")
    shutil.copytree(fetch_checkpoint(), demo, ignore=unread)
    # In the end 126 or 127 tokens of each sequence are not packed: there is room for 128.
    yield from _planned(demo, "135M", small, (96,) if quick else (64, 96, 160))
    by_hand = list(plans_by_hand(demo, small, "cpu").items())[: 2 if quick else None]
    for label, plan in by_hand:
        yield Case(f"135M: {label}", demo, plan)
    if not quick:
        large = folder / "1.1B"
        write_random_checkpoint(large, TINYLLAMA)
        yield from _planned(large, "1.1B", Work(2, 1, 128, 63), (500, 750, 1000, 1500))


def _planned(path: Path, model: str, work: Work, budgets: Sequence[int]) -> Iterator[Case]:
    """What the planner chooses for budgets in MiB, where that fits."""
    sizes = NativeSizes.of_checkpoint(Checkpoint.open(path))
    machine = assumed_profile(torch.device("cpu"), Path(tempfile.gettempdir()))
    count = work.batch_size * work.batches
    asked = Workload(Lengths.of(work.prompt), Lengths.of(work.new), count)
    for budget in budgets:
        there = machine.with_memory(device=budget * _MIB, host=0)
        try:
            plan = find_plan(sizes, there, asked).plan
        except BudgetError:
            continue
        yield Case(f"{model}: the planner's, {budget} MiB", path, plan)


def _run(case: Case) -> Ran:
    """What a process in a cgroup of its own takes."""
    with control_group(None) as group, tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(plan_text(case.plan))
        file.flush()
        command = [sys.executable, "-m", __name__, str(case.path), file.name, str(group.folder)]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            preexec_fn=group.join,
        )
        control = (group.folder / "memory.oom_control").read_text().splitlines()
    killed = "oom_kill 0" not in control
    if done.returncode and not (killed and done.stdout):
        raise QoffError(f"the plan's process failed: {done.stderr[-500:]}")
    counted, peak = json.loads(done.stdout.splitlines()[-1])
    return Ran(counted, peak, killed)


def _child(argv: Sequence[str] | None = None) -> None:
    """Open a plan in a cgroup and answer; prints the first two numbers of `Ran`."""
    parser = argparse.ArgumentParser()
    for name in ("path", "plan", "group"):
        parser.add_argument(name, type=Path)
    args = parser.parse_args(argv)
    group, plan = args.group, replace(read_plan(args.plan), adapt=False)
    places, most = plan.batches * plan.batch_size, plan.context
    full = [_prompt(most - _NEW)] * places
    # The longest of a pass beside shorter ones is much padding; then passes are full. Places become
    # free one by one.
    padded = [most - 2, *[most * 2 // 7] * (plan.batch_size - 1)] * plan.batches
    filling = min(most - 10, max(1, plan.prefill_tokens // plan.batch_size))
    staggered = [*padded, *[filling] * places]

    def answer(limit: int | None = None) -> int:
        params = SamplingParams(
            temperature=100.0,  # with top_p, a choice from nearly all tokens
            top_p=0.999,
            repetition_penalty=1.1,
            logprobs=5,
            seed=1,
            max_tokens=_NEW,
            ignore_eos=True,
        )
        with LLM(args.path, plan, device="cpu") as llm:
            if limit is not None:  # before, the plan would be bound to less
                (group / "memory.limit_in_bytes").write_text(str(limit))
            llm.generate(full, params)
            llm.generate([_prompt(filling)] * places, params)
            few = [replace(params, max_tokens=2 + i % 7) for i in range(len(staggered))]
            llm.generate(list(map(_prompt, staggered)), few)
            llm.embed([_prompt(most)] * places)
            tiers = llm.memory_by_tier()
            return sum(sum(tiers[tier].values()) for tier in ("device", "host"))

    counted = answer()  # compiles, and allocates what a process keeps
    trim()
    before = status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    answer()
    print(json.dumps([counted, status_bytes("VmHWM") - before]), flush=True)
    trim()
    usage = int((group / "memory.usage_in_bytes").read_text())
    lines = (group / "memory.stat").read_text().splitlines()
    stat = {name: int(value) for name, value in map(str.split, lines)}
    usage -= stat["cache"] - stat["mapped_file"]  # pages of files, but for code
    answer(usage + counted + beside_plan(counted))


def _prompt(length: int) -> list[int]:
    return torch.randint(1000, (length,)).tolist()


def tokenizer_bytes(path: Path) -> int:
    """What a checkpoint's tokenizer keeps; memory that was freed is given back.

    The first of three may find some that could not be.
    """
    trim()
    kept, found = list[object](), list[int]()
    for _ in range(3):
        before = status_bytes("VmRSS")
        kept.append(load_tokenizer(path))
        found.append(status_bytes("VmRSS") - before)
    kept.clear()
    trim()
    return max(found)


def trim() -> None:
    """Give memory back that is freed, or garbage."""
    gc.collect()
    return_freed()


if __name__ == "__main__":
    _child()
