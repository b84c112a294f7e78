"""A plan while it runs: what a round of it takes, rates as they turn out, and what would be better.

Rates are medians: of bytes and busy seconds for a link, of seconds computed for the processor. What
a round takes beside is one factor, which is the same for all choices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np
import torch

from qoff.budgets import CPU
from qoff.memory.plan import Residency

from .calls import copied_by_jobs
from .certify import Certifier, choices_of
from .cost import CostModel
from .manual import Memory, Plan
from .mixture import Array
from .phase import RESOURCES, Choices, Phase, round_seconds
from .profile import Link, MachineProfile
from .sizes import Sizes
from .workload import Lengths, Workload

OFF = 1.25  # times what is expected, or a part of it
_GAIN = 1.05  # less is not worth a change
_KEPT = 256  # predictions
_MIXED = (0, 1)  # of PLACED: weights, which all passes of a round share in the block schedule
_CPU, _GPU = RESOURCES.index("cpu"), RESOURCES.index("gpu")


@dataclass(frozen=True)
class Load:
    """What a round computes.

    sequences, passes, tokens: that decode, in how many passes, tokens of each on average. reads,
    read: passes that read prompts, and tokens of one on average. drafted: tokens of each sequence
    beside its newest.
    """

    sequences: int
    passes: int
    tokens: int
    reads: int = 0
    read: int = 0
    drafted: int = 0


@dataclass(frozen=True)
class Observed:
    """A round as it was: seconds, those of them that were computed, and each link's bytes and busy
    seconds."""

    load: Load
    seconds: float
    computed_s: float
    links: Mapping[str, tuple[float, float]]


@dataclass(frozen=True)
class Knobs:
    """What can change between two rounds, and costs no memory.

    schedule: as a plan's. batches: that take new sequences. reads: passes of a round that read
    prompts.
    """

    schedule: str
    batches: int
    reads: int


class RunningPlan:
    """Predicts the rounds of a plan that is open. machine: rates; refitted by `refit`.

    beside: what rounds take, in seconds that the model says.
    """

    def __init__(
        self,
        sizes: Sizes,
        plan: Plan,
        memory: Memory,
        residency: Residency,
        machine: MachineProfile,
        dtype: torch.dtype,
        beside: float = 1.0,
    ) -> None:
        self.sizes, self.plan, self.machine = sizes, plan, machine
        self.memory, self.residency, self.dtype = memory, residency, dtype
        self.beside = beside
        self._known: dict[tuple[Load, str], Array] = {}
        work = Workload(Lengths.of(plan.context), Lengths.of(1), 1)
        self._placed = self.certifier(work).placed(plan, residency)

    @property
    def offloads(self) -> bool:
        """Whether anything moves during a round."""
        return bool(self._placed.any()) or self.plan.activations != "device"

    def seconds(self, load: Load, schedule: str) -> float:
        """Of a round."""
        units = self.sizes.num_layers + 1
        return self.beside * float(round_seconds(self._busy(load, schedule), units))

    def refit(self, rounds: Sequence[Observed], schedule: str) -> list[str]:
        """Take the rates of these rounds; says in words which ones changed."""
        before, said = self.machine, list[str]()
        changed: dict[str, Any] = {}
        links = [("disk read", "disk_read")]
        if not copied_by_jobs(before, self.sizes):
            links.append(("to device", "to_device"))
        for name, field in links:
            link: Link = getattr(before, field)
            rates = [n / s for n, s in (one.links[name] for one in rounds) if n and s]
            if len(rates) > len(rounds) // 2:
                changed[field] = replace(link, bytes_per_s=median(rates), request_s=0.0)
                said.append(_changed(name, link.bytes_per_s, median(rates)))
        if "to_device" in changed:
            changed["from_device"] = changed["to_device"]  # their copies are counted together
        at = RESOURCES.index("gpu" if before.on_gpu else "cpu")
        slower = median(one.computed_s / self._busy(one.load, schedule)[at] for one in rounds)
        self.machine = replace(before, **changed)
        self.beside = self._factor(rounds, schedule)
        if not 1 / OFF < self.beside < OFF:  # these do not explain it
            self.machine = replace(self.machine, device=before.device.slower(slower))
            said.append(f"computing takes {slower:.2g} times as long")
            self.beside = self._factor(rounds, schedule)
        return [text for text in said if text]

    def _factor(self, rounds: Sequence[Observed], schedule: str) -> float:
        """How many times as long rounds take as the model says with the present rates."""
        self._known.clear()
        self.beside = 1.0
        return median(one.seconds / self.seconds(one.load, schedule) for one in rounds)

    def best(self, now: Knobs, load: Load, wanted: int) -> Knobs:
        """The knobs for a load like this one, with so many sequences that want to decode."""
        plan, limit = self.plan, self.plan.token_s or np.inf

        def score(schedule: str, batches: int) -> tuple[bool, float]:
            count = max(1, min(wanted, batches * plan.batch_size))
            one = Load(count, min(batches, count), load.tokens, drafted=load.drafted)
            seconds = self.seconds(one, schedule)
            return seconds <= limit, count / seconds if seconds <= limit else 1 / seconds

        options = [(s, b) for s in ("block", "sequential") for b in range(1, plan.batches + 1)]
        found = max(options, key=lambda option: score(*option))
        was = score(now.schedule, now.batches)
        kept, rate = score(*found)
        if kept == was[0] and rate < _GAIN * was[1]:
            found = (now.schedule, now.batches)
        schedule, batches = found
        return Knobs(schedule, batches, self._reads(schedule, batches, load, wanted))

    def _reads(self, schedule: str, batches: int, load: Load, wanted: int) -> int:
        """The most passes of a round that may read prompts while the others decode in time."""
        plan = self.plan
        if plan.token_s is None:
            return plan.batches
        count = max(1, min(wanted, batches * plan.batch_size))
        piece = min(plan.prefill_tokens, max(1, load.tokens))
        one = Load(count, min(batches, count), load.tokens, 1, piece, load.drafted)
        for reads in range(plan.batches, 1, -1):
            if self.seconds(replace(one, reads=reads), schedule) <= plan.token_s:
                return reads
        return 1

    def _busy(self, load: Load, schedule: str) -> Array:
        """Seconds that each resource is busy in a round, [RESOURCES]."""
        load = replace(load, tokens=-(-load.tokens // 64) * 64)
        found = self._known.get((load, schedule))
        if found is not None:
            return found
        block, placed = schedule == "block", self._placed
        total, shared = np.zeros(len(RESOURCES)), np.zeros(len(RESOURCES))
        for phase in self._phases(load, block):
            weights = np.where(np.isin(np.arange(placed.shape[1]), _MIXED), placed, 0.0)
            base = phase.busy(placed)[0]
            of_weights = (phase.busy(weights) - phase.base)[0] * block
            if self.plan.cpu_experts:  # whose pairs are computed, not brought once for all
                of_weights[[_CPU, _GPU]] = 0.0
            total += base - of_weights
            shared = np.maximum(shared, of_weights)
        total += shared
        if len(self._known) >= _KEPT:
            self._known.clear()
        self._known[load, schedule] = total
        return total

    def _phases(self, load: Load, block: bool) -> list[Phase]:
        found = list[Phase]()
        if load.sequences:
            work = Workload(Lengths.of(max(1, load.tokens)), Lengths.of(1), load.sequences)
            size = -(-load.sequences // load.passes)
            cost = self.certifier(work).cost
            choice = self._choice(size, load.passes, 1, block)
            found.append(cost.decode(choice, load.drafted))
        if load.reads:
            work = Workload(Lengths.of(load.read), Lengths.of(1), load.reads)
            cost = self.certifier(work).cost
            found.append(cost.prefill(self._choice(1, load.reads, load.read, block)))
        return found

    def _choice(self, size: int, batches: int, prefill: int, block: bool) -> Choices:
        changed = replace(
            self.plan,
            batch_size=size,
            batches=batches,
            prefill_tokens=prefill,
            schedule="block" if block else "sequential",
        )
        return choices_of(changed)

    def certifier(self, work: Workload) -> Certifier:
        """Counts and forecasts plans for a workload at the present rates."""
        size, bits = self.dtype.itemsize, self.plan.activation_bits
        plan, sizes = self.plan, self.sizes
        how = plan.kv, size, bits, plan.frees(self.machine.on_gpu), plan.cpu_expert_tokens
        cost = CostModel(sizes, self.machine, work, *how)
        return Certifier(cost, self.plan, CPU, self.dtype)


def _changed(name: str, before: float, now: float) -> str:
    if abs(now / before - 1) <= 0.05:
        return ""
    return f"{name} {before / 1e9:.3g} to {now / 1e9:.3g} GB/s"
