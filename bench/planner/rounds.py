"""What the planner predicts, beside what was measured: decode rounds of `bench.offload`'s plans.

The machine is measured between rounds in which every plan runs in turn. A prediction is of
the plan as it is, with the exact bytes that its weights and KV cache have on each tier: with the
profile as it was measured, and with factors for disk, copies and CPU that are fitted on the plans
of the other model. The order of the plans counts as much as the error: Kendall's tau between
predicted and measured seconds.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize
from scipy.stats import kendalltau

from bench.demo import fetch_checkpoint
from bench.harness import Bar, Report
from bench.offload import Case, Work, plans
from bench.random_model import SMALL, TINYLLAMA, write_random_checkpoint
from qoff.checkpoint import Checkpoint
from qoff.engine import LLM
from qoff.engine.simulated import simulated
from qoff.errors import BudgetError
from qoff.measure.profile import measured_profile
from qoff.plan.certify import Certified, Certifier, choices_of
from qoff.plan.cost import CostModel
from qoff.plan.phase import RESOURCES, round_seconds
from qoff.plan.profile import Link, MachineProfile
from qoff.plan.sizes import ModelSizes
from qoff.plan.workload import Lengths, Workload

_ERROR, _TAU = 0.15, 0.8  # wanted


def predicted(llm: LLM, machine: MachineProfile, work: Work) -> Certified:
    """The forecast of the plan that an LLM is open with, and what it takes in virtual time."""
    plan, checkpoint = llm.plan, llm.runtime.checkpoint
    count = work.batch_size * work.batches
    workload = Workload(Lengths.of(work.prompt), Lengths.of(work.new), count)
    sizes = ModelSizes.of_checkpoint(checkpoint)
    cost = CostModel(sizes, machine, workload, plan.kv, 4)
    certifier = Certifier(cost, plan, torch.device("cpu"), torch.float32)
    found = certifier.forecast(choices_of(plan), plan, llm.memory, llm.runtime.residency)
    return replace(found, simulated=simulated(found, sizes, machine, workload))


@dataclass(frozen=True)
class Measured:
    """Decode rounds of a model's plans: seconds of each run, and what is predicted."""

    seconds: Mapping[str, list[float]]
    found: Mapping[str, Certified]
    refused: list[str]

    def median(self, label: str) -> float:
        return statistics.median(self.seconds[label])


def measured(path: Path, work: Work, rounds: int) -> Measured:
    """Run all plans of a model in turn, so many times each."""
    folder, profiles = Path(tempfile.gettempdir()), list[MachineProfile]()
    refused = list[str]()
    with ExitStack() as stack:
        cases: dict[str, Case] = {}
        for label, plan in plans(path, work, "cpu").items():
            try:
                cases[label] = stack.enter_context(Case(path, work, plan, "cpu"))
            except BudgetError as refusal:
                refused.append(f"{label}: refused: {refusal}")
        for case in cases.values():
            case()  # compiles, and compares each file with its checksum
        seconds: dict[str, list[float]] = {label: [] for label in cases}
        for number in range(rounds):
            if number % 2 == 0:  # disks are faster in some minutes than in others
                device = torch.device("cpu")
                profiles.append(measured_profile(device, Checkpoint.open(path).path, folder))
            for label, case in cases.items():
                seconds[label].append(case().seconds)
        machine = typical(profiles)
        found = {label: predicted(case.llm, machine, work) for label, case in cases.items()}
    return Measured(seconds, found, refused)


def typical(profiles: Sequence[MachineProfile]) -> MachineProfile:
    """The last one, with the medians of what links reached in all."""
    links = ("disk_read", "disk_write", "to_device", "from_device")

    def middle(name: str) -> Link:
        values = [vars(getattr(one, name)) for one in profiles]
        return Link(**{key: statistics.median(v[key] for v in values) for key in values[0]})

    found: dict[str, Any] = {name: middle(name) for name in links}
    return replace(profiles[-1], **found)


class Factors:
    """How many times as long links and processor take as the profile says; fitted to runs."""

    def __init__(self, values: Sequence[float] = (1.0, 1.0, 1.0)) -> None:
        disk, copies, cpu = values
        each = {"disk read": disk, "disk write": disk, "to device": copies, "from device": copies}
        self.values = tuple(values)
        self._each = np.array([{**each, "cpu": cpu}.get(name, 1.0) for name in RESOURCES])

    def seconds(self, one: Certified) -> float:
        """Of a decode round of a plan."""
        busy = np.array([one.decode.busy[name] for name in RESOURCES]) * self._each
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


def add(result: Report, name: str, runs: Measured, how: str, said: Mapping[str, float]) -> None:
    """The errors of predictions, and how well they order the plans."""
    took = {label: runs.median(label) for label in said}
    tau = float(kendalltau(list(took.values()), list(said.values())).statistic)
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
    result.ratios[f"{name}, {how}: Kendall's tau"] = tau
    if how != "profile":
        result.bars.append(Bar(f"{name}, {how}: 1 - median error", 1 - _ERROR, 1 - error))
        result.bars.append(Bar(f"{name}, {how}: Kendall's tau", _TAU, tau))


def measure(quick: bool, turns: int = 5) -> Report:
    """Both models, and each predicted with what was fitted on the other."""
    turns = 1 if quick else turns
    folder = Path(tempfile.mkdtemp(prefix="qoff-planner-"))
    try:
        write_random_checkpoint(folder / "qoff", SMALL if quick else TINYLLAMA)
        works = works_of(quick)
        paths = fetch_checkpoint(), folder / "qoff"
        runs = {
            name: measured(path, work, turns)
            for path, (name, work) in zip(paths, works.items(), strict=True)
        }
    finally:
        shutil.rmtree(folder)
    return compared(runs, {"quick": quick, "turns": turns})


def works_of(quick: bool) -> dict[str, Work]:
    """What the plans of each model do."""
    return {
        "135M": Work(2, 2, 128, 8) if quick else Work(2, 2, 256, 12),
        "1.1B random": Work(2, 2, 64, 4) if quick else Work(2, 2, 128, 6),
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
        disk, copies, cpu = fitted[name].values
        result.notes.append(
            f"{name}: seconds by the profile's: disk {disk:.2f}, copies {copies:.2f}, CPU {cpu:.2f}"
        )
    return result
