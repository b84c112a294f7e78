"""Another plan in the same memory while one runs: how much faster it is, and what a change costs.

Changing means that no sequence begins until those that run are done, that all is closed, and that
weights are read again. So it is the work that is left which tells whether it pays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from qoff.errors import QoffError
from qoff.kvcache.store.placement import DEVICE, HOST

from .adapt import Knobs, Load, RunningPlan
from .certify import choices_of
from .manual import Memory, Plan
from .search import find_plan
from .workload import Lengths, Workload

HORIZON_S = 600.0  # of work like that which is there, where nobody knows how much will come
_LEVELS = 8  # numbers of sequences for which a round is computed


@dataclass(frozen=True)
class Remaining:
    """Work that is left.

    running: tokens that each sequence with a place may still get. waiting: sequences without one.
    follows: those that will be asked for later, inf where nobody knows. prompt, answer: tokens of a
    sequence on average. shared: tokens of prompts that are read, and would be read once more.
    """

    running: Sequence[float]
    waiting: int
    follows: float = 0.0
    prompt: float = 1.0
    answer: float = 1.0
    shared: int = 0

    @property
    def open_ended(self) -> bool:
        """Whether nobody knows how much will be asked for."""
        return self.follows == math.inf

    @property
    def there(self) -> int:
        """Sequences that run or wait."""
        return len(self.running) + self.waiting


@dataclass(frozen=True)
class Better:
    """A plan that is faster now. gain: times.

    request_s: seconds of a request, of many together, with the plan that is open. prompt_s: of a
    token of a prompt. loaded: bytes of weights that it has in memory.
    """

    plan: Plan
    gain: float
    request_s: float
    prompt_s: float
    loaded: int

    def saved(self, left: Remaining) -> float:
        """Seconds that the work which has no place yet takes less."""
        known = (left.waiting + (0 if left.open_ended else left.follows)) * self.request_s
        seconds = max(HORIZON_S, known) if left.open_ended else known
        return seconds * (1 - 1 / self.gain)

    def cost(self, left: Remaining, running: RunningPlan, knobs: Knobs, opened_s: float) -> float:
        """Seconds of the change. opened_s: what opening took before."""
        read = self.loaded / running.machine.disk_read.bytes_per_s
        again = left.shared * self.prompt_s
        return _draining(left, running, knobs) + max(opened_s, read) + again


def better_plan(
    running: RunningPlan,
    now: Knobs,
    left: Remaining,
    beside: Callable[[Plan], int] = lambda _: 0,
    places: int = 1,
) -> Better | None:
    """What the planner would choose now in the same memory; None where it finds nothing faster.

    On a CPU, host and device are one memory. Prompts are cut into the same pieces and the cache is
    attended to in the same place, so tokens are the same but for where KV blocks of a GPU lie.
    beside: bytes that a plan takes on the device for what the planner does not know. places: of
    sequences that a plan has, at least.
    """
    plan = running.plan
    if plan.cpu_experts:  # other ones would round otherwise
        return None
    requests = left.there + (0 if left.open_ended else int(left.follows))
    work = _workload(plan, left, max(1, requests))
    extra = beside(plan)
    for _ in range(2):
        machine = running.machine.with_memory(**_room(running, extra))
        try:
            found = find_plan(
                running.sizes, machine, work, plan, running.dtype, like=plan, places=places
            )
        except QoffError:
            return None
        wanted, before = beside(found.plan), extra
        extra = max(extra, wanted)
        if wanted <= before:
            break
    else:
        return None
    open_now = replace(plan, schedule=now.schedule, batches=now.batches)  # type: ignore[arg-type]
    certifier = running.certifier(work)
    choice = choices_of(open_now)
    same = certifier.forecast(choice, open_now, running.memory, running.residency)
    gain = same.seconds / found.seconds
    if gain <= 1:
        return None
    device = (found.plan.device_memory or 0) + before
    read = found.prefill.rounds * found.prefill.seconds / max(1.0, found.prefill.tokens)
    always = plan.cpu_attention == "always"
    wanted_plan = replace(
        found.plan,
        context=plan.context,
        device_memory=device,
        adapt=plan.adapt,
        cpu_attention="always" if always else found.plan.cpu_attention,
    )
    return Better(
        wanted_plan,
        gain,
        running.beside * same.seconds / work.requests,
        running.beside * read,
        found.residency.resident_bytes + found.residency.host_weight_bytes,
    )


def _workload(plan: Plan, left: Remaining, requests: int) -> Workload:
    """Requests like those that are left, of the plan's context at most."""
    answer = min(max(1.0, left.answer), max(1, plan.context - 1))
    longest = max(1, math.ceil(answer), plan.context // 8)
    most = max(1, plan.context - longest)
    prompts = Lengths(min(most, max(1.0, left.prompt)), most)
    return Workload(prompts, Lengths(answer, longest), requests, token_s=plan.token_s)


def _room(running: RunningPlan, extra: int) -> dict[str, int]:
    """Bytes by tier that the open plan may take, or does; extra: of these, for something else."""
    plan, memory, residency = running.plan, running.memory, running.residency
    device = (plan.device_memory or _taken(memory, DEVICE, residency.device_bytes)) - extra
    host = plan.host_memory or _taken(memory, HOST, residency.host_bytes)
    if running.machine.on_gpu:
        return {DEVICE: device, HOST: host}
    return {DEVICE: device + host, HOST: 0}


def _taken(memory: Memory, tier: str, weights: int) -> int:
    return memory.total(tier) + weights


def _draining(left: Remaining, running: RunningPlan, knobs: Knobs) -> float:
    """Seconds that are lost while the last sequences end and none takes their places.

    Where more may always come, all places could be taken meanwhile.
    """
    tokens = sorted(left.running)
    if not tokens:
        return 0.0
    plan, count = running.plan, len(tokens)
    length = int(min(plan.context, left.prompt + left.answer / 2))
    levels = np.unique(np.linspace(1, count, _LEVELS).round().astype(int))

    def seconds(active: int) -> float:
        load = Load(active, min(knobs.batches, active), length)
        return running.seconds(load, knobs.schedule)

    each = [seconds(int(active)) for active in levels]
    steps = np.diff(tokens, prepend=0.0)
    active = count - np.arange(count)
    alone = float((steps * np.interp(active, levels, each)).sum())
    places = knobs.batches * plan.batch_size if left.open_ended else count
    return alone - sum(tokens) * seconds(places) / places
