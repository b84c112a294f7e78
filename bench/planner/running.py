"""While it runs: another program takes most of the disk in the middle of a job, in virtual time.

The same job three times: with a plan that stays as it is, with what can change between two rounds,
and with a change of the plan, too. Virtual time has the engine's own rounds, schedule, rings and
openings; only what the machine itself does is computed from its rates.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import median

from bench.harness import Bar, Report
from qoff.engine.simulated.rounds import SimulatedRounds
from qoff.plan import Plan
from qoff.plan.profile import Link, MachineProfile, Processor
from qoff.plan.search import find_plan
from qoff.plan.sizes import ModelSizes
from qoff.plan.workload import Lengths, Workload
from qoff.quant import QuantConfig

_GIB = 1 << 30
_LLAMA_7B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
_FAST, _SLOW = 6e9, 3e8  # bytes a second of the disk, alone and beside the other program
_WANTED = 1.2  # times as fast with a change of the plan as with what changes at once
_ROUNDS = 5  # of which a median is taken


@dataclass(frozen=True)
class _Run:
    """Seconds of a round before and right after the disk slows down, and at the end; of all."""

    before: float
    after: float
    last: float
    whole: float
    plans: tuple[Plan, Plan]


def _machine(memory: int) -> MachineProfile:
    cpu = Processor.of(bytes_per_s=1e11, flops_per_s=2e12, call_s=2e-5)
    disk, copies = Link(_FAST, 5e-5), Link(2e10, 1e-6)
    usable = {"device": memory, "host": 0, "disk": 1000 * _GIB}
    return MachineProfile("made up", False, 16, cpu, cpu, disk, disk, copies, copies, usable)


def _run(
    sizes: ModelSizes, plan: Plan, machine: MachineProfile, work: Workload, first: int
) -> _Run:
    prompt, tokens = int(work.prompt.mean), int(work.answer.mean)
    with SimulatedRounds(sizes, plan, machine) as run:
        began = run.machine.clock.now()
        early = run.answer(first, prompt, tokens)
        run.machine.read.rate = _SLOW
        late = run.answer(work.requests - first, prompt, tokens)
        ended = run.machine.clock.now()
        plans = plan, run.rounds.current.plan
    decoding = [[one.seconds / one.generated for one in part if not one.read and one.generated]
                for part in (early, late)]  # fmt: skip
    return _Run(
        median(decoding[0]),
        median(decoding[1][:_ROUNDS]),
        median(decoding[1][-3 * _ROUNDS : -_ROUNDS]),
        ended - began,
        plans,
    )


def measure(quick: bool) -> Report:
    """A model of 7 billion parameters in 4 GiB, of which its weights alone are more."""
    layers = 4 if quick else 32
    sizes = ModelSizes.of(_LLAMA_7B | {"num_hidden_layers": layers}, QuantConfig(packing="rows16"))
    memory = int(sizes.nbytes * 0.8) + (0 if quick else _GIB // 2)
    work = Workload(Lengths.of(128), Lengths.of(32), 40 if quick else 256)
    machine = _machine(memory)
    found = find_plan(sizes, machine, work)
    result = Report(
        "planner-running",
        {"quick": quick, "disk": _FAST, "then": _SLOW, "memory": memory, "requests": work.requests},
        "a disk that slows down to a twentieth in the middle of a job, in virtual time",
        ("what follows it", "plan at the end", "ms a token before", "after", "at the end", "s"),
    )
    runs = dict[str, _Run]()
    for label, adapt in (("nothing", False), ("rounds", "rounds"), ("the plan, too", True)):
        plan = replace(found.plan, adapt=adapt)  # type: ignore[arg-type]
        runs[label] = one = _run(sizes, plan, machine, work, work.requests // 4)
        last = one.plans[1]
        result.rows.append(
            (label, f"{last.batches} x {last.batch_size}, {last.schedule}",
             f"{one.before * 1e3:.1f}", f"{one.after * 1e3:.1f}", f"{one.last * 1e3:.1f}",
             f"{one.whole:.1f}")
        )  # fmt: skip
        result.measured[label] = {
            "before_s": one.before,
            "after_s": one.after,
            "last_s": one.last,
            "whole_s": one.whole,
            "batches": last.batches,
            "batch_size": last.batch_size,
        }
    gain = runs["rounds"].whole / runs["the plan, too"].whole
    result.ratios["whole job, rounds alone / the plan, too"] = gain
    result.bars.append(Bar("times as fast with a change of the plan", _WANTED, gain))
    return result
