"""The chosen plan beside random ones that fit the same memory: all of them run.

The machine is measured first. Plans run in turn, so that a slow minute is everybody's. After each
of the first turns the slower half goes no further, unless a plan is within 10 % of the fastest; the
chosen one always goes on. Those that are left have more turns, by whose medians they are compared:
turns of one plan differ by more than the best plans do. The interval is of the ratio of chosen and
best under resampling of the turns.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from bench.demo import fetch_checkpoint
from bench.harness import Bar, Report
from qoff.checkpoint import Checkpoint
from qoff.engine import LLM, SamplingParams
from qoff.engine.simulated import simulated
from qoff.measure.profile import measured_profile
from qoff.plan.native_sizes import NativeSizes
from qoff.plan.saved import plan_values
from qoff.plan.search import find_plan
from qoff.plan.workload import Lengths, Workload

from .candidates import Candidates

_WITHIN = 0.05
_NEAR, _LEAST = 1.1, 4  # times the fastest, and how many plans, that always go on
_MEMORY = 72 << 20  # bytes: not all of the demo model's weights fit
_SAMPLES = 2000


def measure(quick: bool, rivals: int = 30, turns: int = 5, more: int = 15) -> Report:
    """The demo model, in less memory than its weights take."""
    if quick:
        rivals, turns, more = 2, 1, 1
    result = Report(
        "planner-regret",
        {"quick": quick, "rivals": rivals, "turns": turns, "more turns": more},
        "seconds of the same requests, all plans in turn",
        ("plan", "turns", "seconds", "predicted"),
    )
    path, folder = fetch_checkpoint(), Path(tempfile.gettempdir())
    work = Workload(Lengths.of(96), Lengths.of(8 if quick else 24), 8)
    sizes = NativeSizes.of_checkpoint(Checkpoint.open(path))
    machine = measured_profile(torch.device("cpu"), Checkpoint.open(path).path, folder)
    machine = machine.with_memory(device=_MEMORY, host=0)
    timed = partial(simulated, sizes=sizes, machine=machine, workload=work)
    chosen = find_plan(sizes, machine, work, simulate=timed)
    drawn = Candidates(sizes, machine, work, replace(chosen.plan)).drawn(rivals, seed=1)
    with ExitStack() as stack:
        opened = [
            stack.enter_context(LLM(path, replace(one.plan, adapt=False), device="cpu"))
            for one in (chosen, *drawn)
        ]
        short = replace(work, requests=1, answer=Lengths.of(2))
        for llm in opened:
            _seconds(llm, short)  # compiles, and compares files with their checksums
        seconds = race([partial(_seconds, llm, work) for llm in opened], turns, more)
    for number, (one, took) in enumerate(zip((chosen, *drawn), seconds, strict=True)):
        label = "chosen" if number == 0 else f"random {number}"
        result.rows.append(
            (label, f"{len(took)}", f"{statistics.median(took):.2f}", f"{one.seconds:.2f}")
        )
        result.measured[label] = {
            "measured_s": took,
            "predicted_s": one.seconds,
            "plan": plan_values(one.plan),
        }
    last = list(zip(*(took for took in seconds if len(took) == turns + more), strict=True))
    low, high = interval(last)
    result.ratios["chosen by best"] = ratio(last)
    result.notes.append(f"{len(last[0])} of {len(seconds)} plans had all turns")
    result.notes.append(f"chosen by best: 95 % of resampled turns are in {low:.3f} to {high:.3f}")
    result.bars.append(Bar("best by chosen", 1 - _WITHIN, 1 / ratio(last)))
    return result


def race(runs: Sequence[Callable[[], float]], turns: int, more: int) -> list[list[float]]:
    """Seconds of each run by turns, of those that went on; the first one always does.

    more: turns of those that the others left.
    """
    seconds = [list[float]() for _ in runs]
    left = list(range(len(runs)))
    for turn in range(turns + more):
        for number in left:
            seconds[number].append(runs[number]())
        if turn >= turns:
            continue
        medians = {number: statistics.median(seconds[number]) for number in left}
        order = sorted(left, key=lambda number: medians[number])
        near = _NEAR * medians[order[0]]
        kept = {0, *order[: max(_LEAST, len(left) // 2)]}
        left = [number for number in left if number in kept or medians[number] <= near]
    return seconds


def ratio(seconds: Sequence[Sequence[float]]) -> float:
    """The first plan's median seconds by the least of all; seconds: of each turn, of each plan."""
    medians = [statistics.median(column) for column in zip(*seconds, strict=True)]
    return medians[0] / min(medians)


def interval(seconds: Sequence[Sequence[float]]) -> tuple[float, float]:
    """What 95 % of `ratio` lie between when turns are drawn again."""
    numbers = random.Random(0)
    found = sorted(ratio(numbers.choices(seconds, k=len(seconds))) for _ in range(_SAMPLES))
    return found[_SAMPLES // 40], found[-_SAMPLES // 40]


def _seconds(llm: LLM, work: Workload) -> float:
    """To answer all requests."""
    count, prompt = work.requests, int(work.prompt.mean)
    numbers = torch.Generator().manual_seed(1)
    prompts = torch.randint(1000, (count, prompt), generator=numbers).tolist()
    params = SamplingParams(temperature=0, max_tokens=work.answer.most, ignore_eos=True)
    start = time.perf_counter()
    llm.generate(prompts, params)
    return time.perf_counter() - start
