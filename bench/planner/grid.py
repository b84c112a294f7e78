"""The chosen plan beside all plans of a grid, in virtual time."""

from __future__ import annotations

from bench.harness import Bar, Report
from bench.random_model import SMALL
from qoff.engine.simulated import simulated
from qoff.kvcache import KVQuant
from qoff.plan import Plan
from qoff.plan.native_sizes import NativeSizes
from qoff.plan.processor import Processor
from qoff.plan.profile import Link, MachineProfile
from qoff.plan.search import find_plan
from qoff.plan.workload import Lengths, Workload
from qoff.units import format_size

from .candidates import Candidates

_WITHIN = 0.05
_MIB = 1 << 20


def machine(device: float, disk: float) -> MachineProfile:
    """A CPU with so many bytes of memory, and such a disk; all weights fit 7 MiB."""
    cpu = Processor.of(1e10, 1e11, 1e-5)
    link, copies = Link(disk, 1e-4, 1e-10), Link(4e9, 1e-5, 1e-10)
    usable = {"device": int(device), "host": 0, "disk": 1 << 30}
    return MachineProfile("made up", False, 4, cpu, cpu, link, link, copies, copies, usable)


def measure(quick: bool) -> Report:
    """Some machines, each with all plans for a few requests."""
    result = Report(
        "planner-grid",
        {"quick": quick},
        "the chosen plan beside all of a grid, seconds of the work in virtual time",
        ("machine", "plans", "chosen", "best", "regret", "the model's first"),
    )
    sizes = NativeSizes.of(SMALL | {"num_hidden_layers": 8})
    work = Workload(Lengths.of(192), Lengths.of(32), 3 if quick else 6)
    template = Plan(context=work.context, kv=KVQuant(window=16))
    memories, disks = ((8.0,), (3e8,)) if quick else ((6.0, 6.5, 12.0), (1e8, 1e9))
    for memory in memories:
        for disk in disks:
            there = machine(memory * _MIB, disk)
            rivals = Candidates(sizes, there, work, template).all()
            seconds = [simulated(one, sizes, there, work).seconds for one in rivals]
            found = find_plan(
                sizes,
                there,
                work,
                template,
                simulate=lambda one: simulated(one, sizes, there, work),  # noqa: B023
            )
            first = simulated(find_plan(sizes, there, work, template), sizes, there, work)
            assert found.simulated is not None
            chosen, best = found.simulated.seconds, min(seconds)
            label = f"{format_size(int(memory * _MIB))}, disk {disk / 1e9:g} GB/s"
            regret = chosen / best - 1
            result.rows.append(
                (label, f"{len(seconds)}", f"{chosen:.3f}", f"{best:.3f}", f"{regret:+.1%}",
                 f"{first.seconds / best - 1:+.1%}")
            )  # fmt: skip
            result.measured[label] = {
                "chosen_s": chosen,
                "first_s": first.seconds,
                "all_s": seconds,
            }
            result.bars.append(Bar(f"{label}: best by chosen", 1 - _WITHIN, best / chosen))
    return result
