"""What `qoff plan --train` chooses: bounds of memory, placement, whose activations are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from qoff.errors import BudgetError
from qoff.kvcache.store.placement import DEVICE, DISK, HOST
from qoff.memory.arena import PAGE, round_up
from qoff.plan.profile import MachineProfile
from qoff.units import format_size

from .activations import shared_out
from .forecast import PHASES, StepForecast, forecast, layer_costs
from .placement import PARTS, TILES, Placement, columns, fitted, placed, placed_with
from .planned import Planned
from .room import beside_arenas
from .sizes import Sizes
from .swaps import STAGES, Place

_PARTS = 8  # of the memory that activations could take: so many bounds are tried


@dataclass(frozen=True)
class TrainingPlan:
    """How a training fits a machine.

    device_memory, host_memory, activation_memory, activation_disk: the bounds to give to `offload`;
    the first is None where layers are whole and hidden states near, the second where all fits.
    kept, swapped: layers and micro-batches whose activations are. stages: bytes in memory of those
    that are swapped. on_disk: of those that are swapped.
    """

    job: Planned
    machine: MachineProfile
    placement: Placement
    device_memory: int | None
    host_memory: int | None
    activation_memory: int
    activation_disk: int
    kept: frozenset[Place]
    swapped: frozenset[Place]
    activations: int
    on_disk: int
    frozen_in_host: int
    step: StepForecast

    def bytes_by_tier(self) -> dict[str, dict[str, int]]:
        """Bytes by tier and purpose. On a CPU device and host are one memory."""
        device = {**self.placement.device, **_beside(self.job)}
        device["activations that are kept"] = self.activations
        host, disk = dict(self.placement.host), dict(self.placement.disk)
        host["frozen layers"] = self.frozen_in_host
        disk["activations"] = self.on_disk
        return {DEVICE: device, HOST: host, DISK: disk}

    def line(self) -> str:
        """What a step takes, in one line."""
        job, step = self.job, self.step
        busy = step.by_resource[step.limit] / step.seconds
        return (
            f"{job.learned / 1e9:.3g} of {job.parameters / 1e9:.3g} billion parameters learn, "
            f"{job.sizes.micro_batches} x {job.tokens:,} tokens a step; limit: {step.limit} "
            f"{busy:.0%}; {step.seconds:.3g} s a step, {step.tokens_per_s:.3g} tokens/s expected"
        )

    def tiers(self) -> list[tuple[str, ...]]:
        """Rows of bytes: tier, purpose, bytes; with the sum and what there is."""
        rows: list[tuple[str, ...]] = []
        found, one = self.bytes_by_tier(), not self.machine.on_gpu
        for tier, purposes in found.items():
            rows += [(tier, name, format_size(n)) for name, n in purposes.items() if n]
            used, usable = sum(purposes.values()), self.machine.usable[tier]
            if tier == HOST and one:
                used, usable = used + sum(found[DEVICE].values()), self.machine.usable[DEVICE]
            if (used or usable) and not (tier == DEVICE and one):
                there = f"{format_size(used)} of {format_size(usable)}"
                rows.append(
                    (tier, "in all, with the device's" if one and tier == HOST else "in all", there)
                )
        return rows

    def resources(self) -> list[tuple[str, ...]]:
        """Rows of seconds: resource, busy in each phase."""
        phases = [name for name in PHASES if name in self.step.phases]
        rows: list[tuple[str, ...]] = [
            (name, *(self._busy(phase, name) for phase in phases)) for name in self.step.by_resource
        ]
        return [*rows, ("in all", *(f"{self.step.phases[p]:.3g} s" for p in phases))]

    def activation_line(self) -> str:
        """What becomes of what layers save for their backward."""
        count = self.job.layers * self.job.sizes.micro_batches
        again = count - len(self.kept) - len(self.swapped)
        return (
            f"activations of {count} layers x micro-batches: {len(self.kept)} kept, "
            f"{len(self.swapped)} swapped to disk, {again} computed again"
        )

    def options(self) -> dict[str, str]:
        """The options of `qoff finetune` that take this plan."""
        found = {}
        if self.machine.on_gpu:
            found = {"--device": "cuda"}
        if self.device_memory is not None:
            beside = 0 if self.machine.on_gpu else sum(beside_arenas(self.job).values())
            found["--device-memory"] = f"{self.device_memory + beside}"
        if self.host_memory is not None:
            found["--host-memory"] = f"{self.host_memory}"
        if self.activation_memory:
            found["--activation-memory"] = f"{self.activation_memory}"
        if self.activation_disk:
            found["--activation-disk"] = f"{self.activation_disk}"
        if sum(self.placement.disk.values()) or self.activation_disk:
            found["--disk"] = "FOLDER"
        return found

    def warnings(self) -> Iterator[str]:
        """What the user may not expect."""
        yield from self.machine.notes
        if self.machine.on_gpu:
            yield (
                "training ran on one kind of GPU, an H200, with a small Llama; tiles, swapped "
                "activations and adapters beside packed weights on disk never ran on one"
            )
        elif "32" not in self.machine.device.matmul:
            yield "products of floats were not measured; qoff env --measure measures them now"
        if not self.job.costs:
            yield "what its layers keep depends on values: planned as if computed again"

    def values(self) -> dict[str, Any]:
        """All of it for JSON: bytes, seconds."""
        step = self.step
        return {
            "parameters": self.job.parameters,
            "learned": self.job.learned,
            "tokens": step.tokens,
            "bytes": self.bytes_by_tier(),
            "usable": dict(self.machine.usable),
            "options": self.options(),
            "activations": {
                "layers_by_micro_batches": self.job.layers * self.job.sizes.micro_batches,
                "kept": len(self.kept),
                "swapped": len(self.swapped),
            },
            "phases": {
                name: {"seconds": step.phases[name], "busy_s": dict(busy)}
                for name, busy in step.busy.items()
            },
            "seconds": step.seconds,
            "tokens_per_s": step.tokens_per_s,
            "limit": step.limit,
            "warnings": list(self.warnings()),
        }

    def _busy(self, phase: str, name: str) -> str:
        seconds = self.step.busy[phase][name]
        return f"{seconds:.3g} s, {seconds / self.step.phases[phase]:.0%}"


def training_plan(job: Planned, machine: MachineProfile) -> TrainingPlan:
    """The fastest of some plans that fit. Raises BudgetError with the bytes that are missing."""
    apart = machine.on_gpu
    if job.loaded:
        _check(
            HOST if apart else DEVICE, {"the model, while it is taken apart": job.loaded}, machine
        )
    if apart:
        least = _least(job, machine)
        _check(DEVICE, {**least.device, **_beside(job)}, machine)
        _check(HOST, least.host, machine)
    return min(_plans(job, machine), key=lambda plan: plan.step.seconds)


def _plans(job: Planned, machine: MachineProfile) -> Iterator[TrainingPlan]:
    """Plans that fit, by the memory that activations take. Raises BudgetError for none."""
    apart, usable = machine.on_gpu, machine.usable
    costs = layer_costs(job, machine)
    batches = range(job.sizes.micro_batches)
    every = {(i, m): c for i, c in enumerate(costs) for m in batches} if job.costs else {}
    whole = sum(cost.nbytes for cost in every.values())
    refused: BudgetError | None = None
    found = False
    room = usable[DEVICE] - sum(_beside(job).values())
    if apart:
        room -= sum(placed(job.sizes, None, 0, True, apart).device.values())
    bounds = [min(whole, room) * part // _PARTS for part in range(_PARTS + 1)]
    for bound, swaps in product([0, *(n for n in bounds[1:] if n > 0)], (False, True)):
        if swaps and not bound:
            continue
        try:
            trial = replace(job, sizes=replace(job.sizes, swaps=swaps))
            one, device, host, placement = _placement(trial, machine, bound)
            _check(DISK, placement.disk, machine)
            _check(HOST, placement.host if apart else {}, machine)
        except BudgetError as error:
            refused = refused or error
            continue
        in_tiles = {tile.layer for tile in one.sizes.tiles}
        places = {place: cost for place, cost in every.items() if place[0] not in in_tiles}
        free = (usable[DISK] - sum(placement.disk.values())) // PAGE * PAGE
        rate = 1 / (1 / machine.disk_read.bytes_per_s + 1 / machine.disk_write.bytes_per_s)
        kept, swapped = shared_out(places, bound, free * swaps, rate) if places else (set(), set())
        if swaps and not swapped:
            continue
        stage = max((round_up(places[p].on_stage, PAGE) for p in swapped), default=0)
        on_disk = sum(round_up(places[p].on_stage, PAGE) for p in swapped)
        in_host = _frozen_in_host(job, machine, placement)
        found = True
        yield TrainingPlan(
            one,
            machine,
            placement,
            device,
            host,
            bound if kept or swapped else 0,
            on_disk,
            frozenset(kept),
            frozenset(swapped),
            STAGES * stage + sum(places[p].nbytes for p in kept),
            on_disk,
            in_host,
            forecast(one, machine, placement, kept, swapped, in_host),
        )
    if not found and refused is not None:
        raise refused


def _placement(
    job: Planned, machine: MachineProfile, activations: int
) -> tuple[Planned, int | None, int | None, Placement]:
    """What lies where, of the training or the same in tiles; bounds of device and host memory.

    Either is None where there is no need for it. Raises BudgetError where main memory, that of
    both, is too small.
    """
    sizes, usable = job.sizes, machine.usable
    left = usable[DEVICE] - sum(_beside(job).values()) - activations
    if machine.on_gpu and job.frozen is not None:
        bounds = usable[DEVICE], usable[HOST]
        return job, *bounds, _beside_packed(job, machine, activations)
    if machine.on_gpu:
        sizes, found = fitted(sizes, _cut(job), left, usable[HOST], True, apart=True)
        return replace(job, sizes=sizes), left, usable[HOST], found
    every, least = placed(sizes, None, None, False), placed(sizes, None, 0, True)
    if sum(every.totals) <= left:
        return job, None, None, every
    best, bound, before = None, left - least.totals[0], -1
    while bound > before:
        found = placed(sizes, None, bound, True)
        if sum(found.totals[:2]) > left:
            break
        best, before = (bound, found), bound
        bound = left - found.totals[0]  # the more is in memory, the less is on its way
    if best is not None:
        return job, None, *best
    least = _least(job, machine, activations)
    _check(DEVICE, {**least.device, **_beside(job), "activations": activations}, machine)
    device = least.totals[0]
    sizes, found = fitted(sizes, _cut(job), device, left - device, True)
    return replace(job, sizes=sizes), device, left - device, found


def _beside_packed(job: Planned, machine: MachineProfile, activations: int) -> Placement:
    """On a GPU, with hidden states there if these fit, as `room_of`: packed layers take the rest.

    Raises BudgetError.
    """
    for column in columns(job.sizes):
        found = placed_with(column, job.sizes, None, machine.usable[HOST], True, apart=True)
        wanted = {**found.device, **_beside(job), "activations": activations}
        if sum(wanted.values()) <= machine.usable[DEVICE]:
            break
    _check(DEVICE, wanted, machine)
    return found


def _least(job: Planned, machine: MachineProfile, activations: int = 0) -> Placement:
    """With nothing in host memory that may be on disk, in tiles if it has to be.

    The smallest there is, where even that does not fit.
    """
    left = machine.usable[DEVICE] - sum(_beside(job).values()) - activations
    apart = machine.on_gpu
    try:
        return fitted(job.sizes, _cut(job), left, 0, True, apart)[1]
    except BudgetError:
        sizes = _cut(job)(TILES[-1], PARTS[-1])
        return placed_with(columns(sizes)[-1], sizes, None, 0, True, apart)


def _cut(job: Planned) -> Callable[[int, str], Sizes]:
    """As `job.cut`, of the sizes that a job has now."""
    return lambda most, part: replace(job.cut(most, part), swaps=job.sizes.swaps)


def _beside(job: Planned) -> dict[str, int]:
    """Bytes of the device beside the arenas: what torch has, and frozen weights."""
    largest = max((cost.nbytes for cost in job.costs), default=0)
    return {
        "one layer with gradients, about": 2 * largest,
        "frozen weights and their slots": 0 if job.frozen is None else job.frozen.stays,
    }


def _frozen_in_host(job: Planned, machine: MachineProfile, placement: Placement) -> int:
    """Bytes of packed layers that host memory has room for, beside a GPU."""
    if job.frozen is None or not machine.on_gpu:
        return 0
    left = machine.usable[HOST] - sum(placement.host.values())
    taken = 0
    for nbytes in job.frozen.layers:
        taken += nbytes if taken + nbytes <= left else 0
    return taken


def _check(tier: str, wanted: dict[str, int], machine: MachineProfile) -> None:
    """Raise BudgetError for more bytes than a tier has."""
    total, there = sum(wanted.values()), machine.usable[tier]
    if total > there:
        rows = ", ".join(f"{name} ({format_size(n)})" for name, n in wanted.items() if n)
        raise BudgetError(
            f"{tier} memory: {rows} take {format_size(total)}, {format_size(total - there)} more "
            f"than the {format_size(there)} there"
        )
