"""What the planner predicts, beside what was measured: decode rounds of `bench.offload`'s plans.

The machine is measured first, then every plan runs in turn, round after round. A prediction is of
the plan as it is, with the exact bytes that its weights and KV cache have on each tier. The order
of the plans counts as much as the error: Kendall's tau between predicted and measured seconds.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from scipy.stats import kendalltau

from bench.demo import fetch_checkpoint
from bench.harness import Bar, Report, arguments
from bench.offload import Case, Work, plans
from bench.random_model import SMALL, TINYLLAMA, write_random_checkpoint
from qoff.checkpoint import Checkpoint
from qoff.engine import LLM
from qoff.engine.simulated import simulated
from qoff.errors import BudgetError
from qoff.measure.profile import measured_profile
from qoff.plan.certify import TIERS, Certified, Certifier
from qoff.plan.cost import Choices, CostModel
from qoff.plan.profile import MachineProfile
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
    choices = Choices(
        np.array([float(plan.batch_size)]),
        np.array([float(plan.batches)]),
        np.array([float(plan.prefill_tokens)]),
        np.array([plan.schedule == "block"]),
        np.array([plan.attends_on_cpu]),
        np.array([TIERS.index(plan.activations)]),
    )
    certifier = Certifier(cost, plan, torch.device("cpu"), torch.float32)
    found = certifier.forecast(choices, plan, llm.memory, llm.runtime.residency)
    return replace(found, simulated=simulated(found, sizes, machine, workload))


def measure(result: Report, name: str, path: Path, work: Work, rounds: int) -> None:
    """Measure and predict all plans of a model, into the report."""
    folder = Path(tempfile.gettempdir())
    machine = measured_profile(torch.device("cpu"), Checkpoint.open(path).path, folder)
    with ExitStack() as stack:
        cases: dict[str, Case] = {}
        for label, plan in plans(path, work, "cpu").items():
            try:
                cases[label] = stack.enter_context(Case(path, work, plan, "cpu"))
            except BudgetError as refusal:
                result.notes.append(f"{name}: {label}: refused: {refusal}")
        for case in cases.values():
            case()  # compiles, and compares each file with its checksum
        seconds: dict[str, list[float]] = {label: [] for label in cases}
        for _ in range(rounds):
            for label, case in cases.items():
                seconds[label].append(case().seconds)
        found = {label: predicted(case.llm, machine, work) for label, case in cases.items()}
    measured = {label: statistics.median(values) for label, values in seconds.items()}
    by_model = {label: one.decode.seconds for label, one in found.items()}
    by_time = {label: one.simulated.decode.seconds for label, one in found.items() if one.simulated}
    for label, one in found.items():
        row = [f"{name}: {label}", f"{measured[label] * 1e3:.1f}"]
        for said in (by_model[label], by_time[label]):
            row += [f"{said * 1e3:.1f}", f"{said / measured[label] - 1:+.0%}"]
        result.rows.append((*row, one.decode.limit))
        result.measured[f"{name}: {label}"] = {
            "measured_s": seconds[label],
            "predicted_s": by_model[label],
            "simulated_s": by_time[label],
            "busy_s": dict(one.decode.busy),
        }
    for how, said_s in (("cost model", by_model), ("simulator", by_time)):
        tau = float(kendalltau(list(measured.values()), list(said_s.values())).statistic)
        error = statistics.median(abs(said_s[label] / measured[label] - 1) for label in measured)
        result.ratios[f"{name}, {how}: median error"] = error
        result.ratios[f"{name}, {how}: Kendall's tau"] = tau
        result.bars.append(Bar(f"{name}, {how}: 1 - median error", 1 - _ERROR, 1 - error))
        result.bars.append(Bar(f"{name}, {how}: Kendall's tau", _TAU, tau))


def main(argv: Sequence[str] | None = None) -> None:
    """Run the bench."""
    args = arguments(__doc__, argv, large=(bool, False, "a random model of 1.1B parameters, too"))
    result = Report(
        "planner",
        {"quick": args.quick, "large": args.large},
        "decode rounds, measured and predicted",
        ("plan", "measured ms", "cost model ms", "error", "simulated ms", "error", "limit"),
    )
    work, rounds = (Work(2, 2, 128, 8), 1) if args.quick else (Work(16, 2, 256, 12), 3)
    measure(result, "135M", fetch_checkpoint(), work, rounds)
    if args.large:
        folder = Path(tempfile.mkdtemp(prefix="qoff-planner-"))
        try:
            config = SMALL if args.quick else TINYLLAMA
            write_random_checkpoint(folder / "qoff", config)
            small = Work(2, 2, 64, 4) if args.quick else Work(8, 2, 128, 6)
            measure(result, "1.1B random", folder / "qoff", small, rounds)
        finally:
            shutil.rmtree(folder)
    result.publish(args.out)


if __name__ == "__main__":
    main()
