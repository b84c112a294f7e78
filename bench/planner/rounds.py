"""What the planner predicts, beside what was measured: decode rounds of `bench.offload`'s plans.

All plans of both models take turns of a few rounds, and the machine is measured between turns. A
prediction is of the plan as it is, with the exact bytes that its weights and KV cache have on each
tier: with the medians of what was measured, and with factors for disk, copies and CPU that are
fitted on the plans of the other model. The order of the plans counts as much as the error:
Kendall's tau between predicted and measured seconds, of the pairs of plans that the turns tell
apart.
"""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.optimize import minimize

from bench.demo import fetch_checkpoint
from bench.harness import Bar, Report
from bench.offload import ROUNDS, Case, Work, plans
from bench.random_model import SMALL, TINYLLAMA, write_random_checkpoint
from qoff.checkpoint import Checkpoint
from qoff.engine import LLM
from qoff.engine.simulated import simulated
from qoff.errors import BudgetError
from qoff.measure.profile import measured_profile
from qoff.plan.certify import Certified, Certifier, choices_of
from qoff.plan.cost import CostModel
from qoff.plan.native_sizes import NativeSizes
from qoff.plan.phase import RESOURCES, round_seconds
from qoff.plan.profile import MachineProfile, typical
from qoff.plan.workload import Lengths, Workload

_ERROR, _TAU = 0.15, 0.8  # wanted
_BETWEEN = 4  # turns from one measurement of the machine to the next
_SAMPLES, _OUTSIDE = 2000, 0.05  # draws of turns; the part of them that is left out


def predicted(llm: LLM, machine: MachineProfile, work: Work) -> Certified:
    """The forecast of the plan that an LLM is open with, and what it takes in virtual time."""
    plan, checkpoint = llm.plan, llm.runtime.checkpoint
    count = work.batch_size * work.batches
    workload = Workload(Lengths.of(work.prompt), Lengths.of(work.new), count)
    sizes = NativeSizes.of_checkpoint(checkpoint)
    cost = CostModel(sizes, machine, workload, plan.kv, 4)
    certifier = Certifier(cost, plan, torch.device("cpu"), torch.float32)
    found = certifier.forecast(choices_of(plan), plan, llm.memory, llm.runtime.residency)
    return replace(found, simulated=simulated(found, sizes, machine, workload))


@dataclass(frozen=True)
class Measured:
    """Decode rounds of a model's plans: seconds of each turn, and what is predicted."""

    seconds: Mapping[str, list[float]]
    found: Mapping[str, Certified]
    refused: list[str]
    machine: MachineProfile

    def median(self, label: str) -> float:
        return statistics.median(self.seconds[label])


class _Running:
    """All plans of a model, which are in the middle of the same answers."""

    def __init__(self, path: Path, work: Work, own: ExitStack) -> None:
        self.path, self._work = path, work
        self._cases: dict[str, Case] = {}
        self._refused = list[str]()
        self.profiles = list[MachineProfile]()
        for label, plan in plans(path, work, "cpu").items():
            try:
                self._cases[label] = own.enter_context(Case(path, work, plan, "cpu"))
            except BudgetError as refusal:
                self._refused.append(f"{label}: refused: {refusal}")
        for case in self._cases.values():
            case.begin()  # compares each file with its checksum
        self._seconds: dict[str, list[float]] = {label: [] for label in self._cases}

    def measure_machine(self) -> None:
        """By this model's files."""
        folder, there = Path(tempfile.gettempdir()), Checkpoint.open(self.path).path
        self.profiles.append(measured_profile(torch.device("cpu"), there, folder))

    def turn(self) -> None:
        for label, case in self._cases.items():
            self._seconds[label].append(case.turn(ROUNDS).seconds)

    def measured(self, there: MachineProfile) -> Measured:
        """there: what was measured of the machine; how fast it reads is of this model's files."""
        machine = replace(there, disk_read=typical(self.profiles).disk_read)
        found = {
            label: predicted(case.llm, machine, self._work) for label, case in self._cases.items()
        }
        return Measured(self._seconds, found, self._refused, machine)


def measured(works: Mapping[str, tuple[Path, Work]], turns: int) -> dict[str, Measured]:
    """Run all plans of each model in turn, so many times each."""
    with ExitStack() as own:
        running = {name: _Running(path, work, own) for name, (path, work) in works.items()}
        for number in range(turns):
            for one in running.values():
                if number % _BETWEEN == 0:  # disks are faster in some minutes than in others
                    one.measure_machine()
            for one in running.values():
                one.turn()
        there = typical([profile for one in running.values() for profile in one.profiles])
        return {name: one.measured(there) for name, one in running.items()}


class Factors:
    """How many times as long links and processor take as the profile says; fitted to runs."""

    def __init__(self, values: Sequence[float] = (1.0, 1.0, 1.0)) -> None:
        disk, copies, cpu = values
        each = {"disk read": disk, "disk write": disk, "to device": copies, "from device": copies}
        self.values = tuple(values)
        self._each = np.array([{**each, "cpu": cpu}.get(name, 1.0) for name in RESOURCES])

    def seconds(self, one: Certified) -> float:
        """Of a decode round of a plan."""
        said = one.decode
        busy = np.array([said.busy[name] for name in RESOURCES]) * self._each
        cpu = self.values[-1]  # which links wait for
        busy += cpu * np.array([said.idle[name] for name in RESOURCES])
        layers = sum(len(plan.record_bytes) for plan in one.memory.blocks.plans)
        return float(round_seconds(busy, layers + 1))

    @classmethod
    def fitted(cls, to: Measured) -> Factors:
        """Those with the least mean error of logarithms over a model's plans."""

        def error(logs: Sequence[float]) -> float:
            factors = cls([float(np.exp(x)) for x in logs])
            wrong = [np.log(factors.seconds(f) / to.median(x)) for x, f in to.found.items()]
            return float(np.mean(np.abs(wrong)))

        return cls(tuple(np.exp(minimize(error, np.zeros(3), method="Nelder-Mead").x)))


class Order(NamedTuple):
    """How well predictions order plans.

    tau: of the pairs that measurements tell apart, more in the predicted order than not, by all of
    these; a pair that is predicted to be alike is neither. ties: other pairs, of `pairs`.
    """

    tau: float
    ties: int
    pairs: int


def order(seconds: Mapping[str, Sequence[float]], said: Mapping[str, float]) -> Order:
    """seconds: of each plan by turns, which all plans had together.

    Measurements tell a pair apart where 95 % of resampled turns have their medians in one order.
    """
    took = np.array([seconds[label] for label in said])
    draws = np.random.default_rng(0).integers(took.shape[1], size=(_SAMPLES, took.shape[1]))
    medians = np.median(took[:, draws], axis=2)
    guess, total, apart = list(said.values()), 0.0, 0
    pairs = list(combinations(range(len(guess)), 2))
    for i, j in pairs:
        low, high = np.quantile(medians[i] - medians[j], [_OUTSIDE / 2, 1 - _OUTSIDE / 2])
        if low <= 0 <= high:
            continue
        apart += 1
        total += float(np.sign(low) * np.sign(guess[i] - guess[j]))
    return Order(total / max(1, apart), len(pairs) - apart, len(pairs))


def add(result: Report, name: str, runs: Measured, how: str, said: Mapping[str, float]) -> None:
    """The errors of predictions, and how well they order the plans."""
    took = {label: runs.median(label) for label in said}
    found = order(runs.seconds, said)
    error = statistics.median(abs(said[label] / took[label] - 1) for label in took)
    result.rows += [
        (f"{name}: {label}", how, f"{s * 1e3:.1f}", f"{said[label] * 1e3:.1f}",
         f"{said[label] / s - 1:+.0%}", runs.found[label].decode.limit)
        for label, s in took.items()
    ]  # fmt: skip
    result.measured[f"{name}, {how}"] = {
        label: {"measured_s": runs.seconds[label], "predicted_s": said[label]} for label in took
    }
    result.ratios[f"{name}, {how}: median error"] = error
    result.ratios[f"{name}, {how}: Kendall's tau"] = found.tau
    if how != "profile":
        result.bars.append(Bar(f"{name}, {how}: 1 - median error", 1 - _ERROR, 1 - error))
        result.bars.append(Bar(f"{name}, {how}: Kendall's tau", _TAU, found.tau))


def measure(quick: bool, turns: int = 12) -> Report:
    """Both models, and each predicted with what was fitted on the other."""
    turns = 1 if quick else turns
    folder = Path(tempfile.mkdtemp(prefix="qoff-planner-"))
    try:
        write_random_checkpoint(folder / "qoff", SMALL if quick else TINYLLAMA)
        paths = fetch_checkpoint(), folder / "qoff"
        works = works_of(quick, turns).items()
        runs = measured({n: (p, w) for p, (n, w) in zip(paths, works, strict=True)}, turns)
    finally:
        shutil.rmtree(folder)
    return compared(runs, {"quick": quick, "turns": turns})


def works_of(quick: bool, turns: int) -> dict[str, Work]:
    """What the plans of each model do; answers are as long as all turns take."""
    new = 8 + ROUNDS * turns  # a batch begins to decode before others have read
    return {
        "135M": Work(2, 2, 128 if quick else 256, new),
        "1.1B random": Work(2, 2, 64 if quick else 128, new),
    }


def compared(runs: dict[str, Measured], settings: dict[str, Any]) -> Report:
    """Runs of two models beside what is predicted of them."""
    result = Report(
        "planner-rounds",
        settings,
        "decode rounds, measured and predicted",
        ("plan", "constants", "measured ms", "predicted ms", "error", "limit"),
    )
    fitted = {name: Factors.fitted(one) for name, one in runs.items()}
    for (name, one), other in zip(runs.items(), reversed(runs), strict=True):
        result.notes += [f"{name}: {text}" for text in one.refused]
        plain, cross = Factors(), fitted[other]
        add(result, name, one, "profile", {x: plain.seconds(f) for x, f in one.found.items()})
        how = f"fitted on {other}"
        add(result, name, one, how, {x: cross.seconds(f) for x, f in one.found.items()})
        timed = {x: f.simulated.decode.seconds for x, f in one.found.items() if f.simulated}
        add(result, name, one, "virtual time", timed)
        result.measured[f"{name}, machine"] = json.loads(one.machine.text())
        result.measured[f"{name}, busy"] = {x: dict(f.decode.busy) for x, f in one.found.items()}
        disk, copies, cpu = fitted[name].values
        result.notes.append(
            f"{name}: seconds by the profile's: disk {disk:.2f}, copies {copies:.2f}, CPU {cpu:.2f}"
        )
        ties, pairs = order(one.seconds, timed)[1:]
        result.notes.append(f"{name}: {ties} of {pairs} pairs of plans are not told apart")
    return result
