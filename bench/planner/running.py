"""While it runs: another program takes most of the disk in the middle of a job, in virtual time.

The same job three times: with a plan that stays as it is, with what can change between two rounds,
and with a change of the plan, too. Virtual time has the engine's own rounds, schedule, rings and
openings; only what the machine itself does is computed from its rates. Two plans: the planner's for
the fast disk, and one that reads all weights for each batch, which a fast disk hides.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import median

from bench.harness import Bar, Report
from bench.random_model import SMALL
from qoff.kvcache import KVQuant
from qoff.plan import Plan
from qoff.plan.native_sizes import NativeSizes
from qoff.plan.profile import MachineProfile
from qoff.plan.search import find_plan
from qoff.plan.workload import Lengths, Workload

from .grid import machine
from .virtual_rounds import SimulatedRounds

_MIB = 1 << 20
_MEMORY = 9 * _MIB
_FAST, _SLOW = 5e9, 1e8  # bytes a second of the disk, alone and beside the other program
_WANTED = {"the planner's": 0.97, "a batch at a time": 1.5}  # times as fast as rounds alone
_ROUNDS = 5  # of which a median is taken


@dataclass(frozen=True)
class _Run:
    """Seconds of a round before and right after the disk slows down, and at the end; of all."""

    before: float
    after: float
    last: float
    whole: float
    last_plan: Plan


def _run(sizes: NativeSizes, plan: Plan, there: MachineProfile, work: Workload) -> _Run:
    prompt, tokens, first = int(work.prompt.mean), int(work.answer.mean), work.requests // 4
    with SimulatedRounds(sizes, plan, there) as run:
        early = run.answer(first, prompt, tokens)
        run.machine.read.rate = _SLOW
        late = run.answer(work.requests - first, prompt, tokens)
        ended, last = run.machine.clock.now(), run.rounds.current.plan
    rates = [
        [one.seconds / one.generated for one in part if one.generated and not one.read]
        for part in (early, late)
    ]
    return _Run(
        median(rates[0]),
        median(rates[1][:_ROUNDS]),
        median(rates[1][-4 * _ROUNDS : -_ROUNDS]),
        ended,
        last,
    )


def measure(quick: bool) -> Report:
    """A model of which a quarter fits beside the caches of six sequences."""
    sizes = NativeSizes.of(SMALL | {"num_hidden_layers": 8, "num_key_value_heads": 2})
    work = Workload(Lengths.of(96), Lengths.of(32), 40 if quick else 160)
    there = machine(_MEMORY, _FAST)
    template = Plan(context=work.context, kv=KVQuant(window=16))
    chosen = find_plan(sizes, there, work, template).plan
    by_hand = replace(
        template,
        batch_size=2,
        batches=3,
        schedule="sequential",
        prefill_tokens=128,
        device_memory=_MEMORY,
    )
    result = Report(
        "planner-running",
        {"quick": quick, "disk": _FAST, "then": _SLOW, "memory": _MEMORY},
        "a disk that slows down to a fiftieth after a quarter of a job, in virtual time",
        ("plan", "what follows the disk", "at the end", "ms a token before", "after", "at the end",
         "s in all"),
    )  # fmt: skip
    for name, plan in (("the planner's", chosen), ("a batch at a time", by_hand)):
        whole = dict[str, float]()
        for label, adapt in (("nothing", False), ("rounds", "rounds"), ("the plan, too", True)):
            one = _run(sizes, replace(plan, adapt=adapt), there, work)  # type: ignore[arg-type]
            whole[label], last = one.whole, one.last_plan
            result.rows.append(
                (name, label, f"{last.batches} x {last.batch_size}, {last.schedule}",
                 f"{one.before * 1e3:.2f}", f"{one.after * 1e3:.2f}", f"{one.last * 1e3:.2f}",
                 f"{one.whole:.2f}")
            )  # fmt: skip
            result.measured[f"{name}, {label}"] = {
                "before_s": one.before,
                "after_s": one.after,
                "last_s": one.last,
                "whole_s": one.whole,
                "changed": last != plan,
            }
        for label in ("nothing", "rounds"):
            result.ratios[f"{name}: {label} / the plan, too"] = (
                whole[label] / whole["the plan, too"]
            )
        gain = whole["rounds"] / whole["the plan, too"]
        result.bars.append(Bar(f"{name}: times as fast as with rounds alone", _WANTED[name], gain))
    return result
