"""How long a step of training takes on a machine, and what of it takes the time.

As rounds of inference (docs/cost-model.md): a phase takes as long as its busiest resource, and what
the others do for one unit besides.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from qoff.memory.arena import PAGE, round_up
from qoff.plan.mixture import Array
from qoff.plan.phase import RESOURCES, round_seconds
from qoff.plan.profile import MachineProfile

from .activations import Cost
from .placement import Placement
from .planned import Planned, Work
from .swaps import Place

PHASES = ("forward", "backward", "update")
_READ, _WRITE, _IN, _OUT, _CPU, _GPU, _MEMORY, _ = range(len(RESOURCES))
_FORWARD, _BACKWARD, _UPDATE = range(len(PHASES))
_LINKS = (_READ, _WRITE, _IN, _OUT)


@dataclass(frozen=True)
class StepForecast:
    """busy: seconds of each resource by phase. seconds: of each phase. tokens: of a step."""

    busy: Mapping[str, Mapping[str, float]]
    phases: Mapping[str, float]
    tokens: int

    @property
    def seconds(self) -> float:
        """Of a step."""
        return sum(self.phases.values())

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def by_resource(self) -> dict[str, float]:
        """Seconds of a step that each resource is busy, of those that are."""
        found = {name: sum(phase[name] for phase in self.busy.values()) for name in RESOURCES}
        return {name: seconds for name, seconds in found.items() if seconds > 0}

    @property
    def limit(self) -> str:
        """The resource that most of the step waits for: the busiest of the phases it limits."""
        waits = dict.fromkeys(RESOURCES, 0.0)
        for phase, busy in self.busy.items():
            waits[max(busy, key=lambda name: busy[name])] += self.phases[phase]
        return max(waits, key=lambda name: waits[name])


def layer_costs(job: Planned, machine: MachineProfile) -> list[Cost]:
    """What each layer saves, with the seconds that computing it again would take."""
    costs = job.costs or [Cost(0, 0.0)] * job.layers
    return [
        Cost(cost.nbytes, _forward_s(job, work, cost, machine), cost.on_stage)
        for cost, work in zip(costs, job.work, strict=False)
    ]


def forecast(
    job: Planned,
    machine: MachineProfile,
    placement: Placement,
    kept: Collection[Place] = (),
    swapped: Collection[Place] = (),
    frozen_in_host: int = 0,
) -> StepForecast:
    """A step where these layers' activations are kept or swapped; the others are computed again.

    frozen_in_host: bytes of packed layers that come from host memory; the others do from disk.
    """
    count, batches = job.layers, job.sizes.micro_batches
    costs = layer_costs(job, machine)
    again = [(i, m) for i in range(count) for m in range(batches)]
    again = [place for place in again if place not in kept and place not in swapped]
    compute = np.zeros(len(PHASES))
    compute[_FORWARD] = batches * (sum(c.seconds for c in costs) + _head_s(job, machine))
    compute[_BACKWARD] = sum(costs[i].seconds for i, _ in again) + batches * sum(
        _backward_s(job, work, cost, machine) for work, cost in zip(job.work, costs, strict=False)
    )
    moves = _Moves(machine)
    _weights(job, placement, moves)
    _tiles(job, placement, moves)
    _frozen(job, frozen_in_host, moves)
    region = round_up(job.hidden, PAGE)
    again_too, column = set(again), bool(placement.device["hidden states"])
    for i, m in ((i, m) for i in range(count) for m in range(batches)):
        if i in placement.near:
            continue
        near = i in placement.inputs
        if (i, m) in again_too or not column:
            moves.out(near, _FORWARD, region)
        if not column:
            moves.back(near, _FORWARD, region)
        if (i, m) in again_too:
            moves.back(near, _BACKWARD, region)
    if not column:  # gradients of hidden states, of embeddings' too where something learns there
        near = count in placement.inputs
        for _ in range(batches * (count + bool(job.sizes.units[-1].count))):
            moves.out(near, _BACKWARD, region)
            moves.back(near, _BACKWARD, region)
    for i, _ in swapped:
        moves.disk(_WRITE, _FORWARD, round_up(costs[i].on_stage, PAGE))
        moves.disk(_READ, _BACKWARD, round_up(costs[i].on_stage, PAGE))
    memory = np.zeros(len(PHASES))
    memory[_UPDATE if job.sizes.clips else _BACKWARD] = (
        _update_bytes(job) / machine.host.bytes_per_s
    )
    compute[_BACKWARD] += _summed_bytes(job) / machine.device.bytes_per_s
    busy = moves.busy()
    if machine.on_gpu:
        busy[:, _GPU] += compute
        busy[:, _CPU] += memory
        busy[:, _MEMORY] = moves.nbytes.sum(1) / machine.host.bytes_per_s + memory
    else:
        busy[:, _CPU] += compute + memory
    seconds = round_seconds(busy, count + 1)
    rows = zip(PHASES, busy, seconds, strict=True)
    used = [(name, one, s) for name, one, s in rows if s > 0]
    return StepForecast(
        {name: dict(zip(RESOURCES, map(float, one), strict=True)) for name, one, _ in used},
        {name: float(s) for name, _, s in used},
        job.tokens * batches,
    )


class _Moves:
    """Bytes and requests of each phase over each link."""

    def __init__(self, machine: MachineProfile) -> None:
        self._machine, self.on_gpu = machine, machine.on_gpu
        self.nbytes = np.zeros((len(PHASES), len(_LINKS)))
        self._asked = np.zeros((len(PHASES), len(_LINKS)))

    def add(self, link: int, phase: int, nbytes: float, requests: int = 1) -> None:
        self.nbytes[phase, link] += nbytes
        self._asked[phase, link] += requests

    def both_ways(self, phase: int, pieces: Sequence[int]) -> None:
        """From disk and back, to be stepped."""
        for link in (_READ, _WRITE):
            self.add(link, phase, sum(pieces), len(pieces))

    def over(self, link: int, phase: int, nbytes: float, times: int = 1) -> None:
        """Between host memory and a device of its own."""
        if self._machine.on_gpu:
            self.add(link, phase, times * nbytes, times)

    def disk(self, link: int, phase: int, nbytes: float, times: int = 1) -> None:
        """Between the disk and the device."""
        self.add(link, phase, times * nbytes, times)
        self.over(_IN if link == _READ else _OUT, phase, nbytes, times)

    def out(self, near: bool, phase: int, nbytes: float, times: int = 1) -> None:
        """From the device to host memory, if that is near enough, or to disk."""
        self.over(_OUT, phase, nbytes, times) if near else self.disk(_WRITE, phase, nbytes, times)

    def back(self, near: bool, phase: int, nbytes: float, times: int = 1) -> None:
        """The same, the other way."""
        self.over(_IN, phase, nbytes, times) if near else self.disk(_READ, phase, nbytes, times)

    def busy(self) -> Array:
        """Seconds, [PHASES, RESOURCES], with those that moving takes from the CPU."""
        m = self._machine
        found = np.zeros((len(PHASES), len(RESOURCES)))
        for at, link in enumerate((m.disk_read, m.disk_write, m.to_device, m.from_device)):
            nbytes, asked = self.nbytes[:, at], self._asked[:, at]
            found[:, at] = nbytes / link.bytes_per_s + asked * link.request_s
            taken = nbytes * link.cpu_s_per_byte + asked * link.cpu_s_per_request
            found[:, _CPU] += taken / m.cores
        return found


def _weights(job: Planned, placement: Placement, moves: _Moves) -> None:
    """Weights and gradients of layers that learn, and the states of all units."""
    clips = job.sizes.clips
    update = _UPDATE if clips else _BACKWARD  # beside the CPU: nothing goes to the device
    for i, (unit, form) in enumerate(zip(job.sizes.units, job.sizes.forms, strict=False)):
        if i not in placement.states:
            moves.both_ways(update, form.of_pieces(unit))
        nbytes = round_up(unit.nbytes, PAGE)
        grad = round_up(job.sizes.gradient.itemsize * unit.count, PAGE)
        if i == job.layers:
            moves.over(_OUT, _BACKWARD, round_up(4 * unit.count, PAGE))
            moves.over(_IN, update, nbytes)
        if i == job.layers or not unit.count:
            continue
        near = i in placement.weights
        for phase in (_FORWARD, _BACKWARD):
            if phase == _FORWARD or i < job.layers - 1:  # the last one's backward comes at once
                (moves.over if near else moves.disk)(_IN if near else _READ, phase, nbytes)
        moves.over(_OUT, _BACKWARD, grad)
        if not near:
            moves.add(_WRITE, update, nbytes)
            if clips or moves.on_gpu:  # where they are stepped
                moves.add(_READ, update, nbytes)
        if clips and i not in placement.gradients:
            moves.add(_WRITE, _BACKWARD, grad)
            moves.add(_READ, update, grad)


def _tiles(job: Planned, placement: Placement, moves: _Moves) -> None:
    """Weights, gradients and states of tiles, which are read as `Tile.reads` says."""
    sizes, batches = job.sizes, job.sizes.micro_batches
    update = _UPDATE if sizes.clips else _BACKWARD
    forms = sizes.forms[len(sizes.units) :]
    rows = max((tile.count for tile in sizes.tiles if tile.layer == job.layers), default=0)
    whole = 4 * job.tokens * rows  # logits of a tile of the head, of all tokens
    room = placement.device["logits"]
    pieces = max(1, math.ceil(whole / room)) if room else 1
    for j, (tile, form) in enumerate(zip(sizes.tiles, forms, strict=True)):
        weights, gradients, states = (j in near for near in placement.tiles)
        nbytes = round_up(tile.unit.nbytes, PAGE)
        grad = round_up(sizes.summed_in(tile).itemsize * tile.unit.count, PAGE)
        if not states:
            moves.both_ways(update, form.of_pieces(tile.unit))
        reads = tile.reads(job.layers, pieces)
        for phase, times in zip((_FORWARD, _BACKWARD), reads, strict=True):
            moves.back(weights, phase, nbytes, times * batches)
        added = tile.sums(job.layers, pieces) * batches
        moves.out(gradients, _BACKWARD, grad, added)
        moves.back(gradients, _BACKWARD, grad, added - 1)
        if not weights:
            moves.both_ways(update, [nbytes])
        if not gradients:
            times = 3 if sizes.factored else 1  # means, size, step
            moves.add(_READ, update, times * grad, times)


def _frozen(job: Planned, in_host: int, moves: _Moves) -> None:
    """Packed layers, forward and in reverse."""
    if job.frozen is None:
        return
    for phase in (_FORWARD, _BACKWARD):
        left = in_host
        for nbytes in job.frozen.layers:
            if nbytes <= left:
                left -= nbytes
                moves.over(_IN, phase, nbytes)
            else:
                moves.disk(_READ, phase, nbytes)


def _forward_s(job: Planned, work: Work, cost: Cost, machine: MachineProfile) -> float:
    """A layer and a micro-batch: products, attention, and what it saves is written and read."""
    device = machine.device
    pairs = job.tokens**2 / 2 * job.heads
    return (
        work.learned * _product_s(machine, work.bits[0], job.tokens)
        + work.frozen * _product_s(machine, work.bits[1], job.tokens)
        + pairs * float(device.prompt_s(np.asarray(float(job.tokens))))
        + 2 * cost.nbytes / device.bytes_per_s
    )


def _backward_s(job: Planned, work: Work, cost: Cost, machine: MachineProfile) -> float:
    """Twice the products for what learns, once for what does not, in 16 bits where it is packed."""
    device = machine.device
    frozen = 16 if work.bits[1] < 16 else work.bits[1]
    pairs = job.tokens**2 / 2 * job.heads
    return (
        2 * work.learned * _product_s(machine, work.bits[0], job.tokens)
        + work.frozen * _product_s(machine, frozen, job.tokens)
        # Five products for two.
        + 2.5 * pairs * float(device.prompt_s(np.asarray(float(job.tokens))))
        + 2 * cost.nbytes / device.bytes_per_s
    )


def _head_s(job: Planned, machine: MachineProfile) -> float:
    """Logits, loss, and their gradients."""
    head, nothing = job.work[-1], Cost(0, 0.0)
    still = replace(job, heads=0)
    return _forward_s(still, head, nothing, machine) + _backward_s(still, head, nothing, machine)


def _product_s(machine: MachineProfile, bits: int, rows: int) -> float:
    """Seconds for each element of a matrix."""
    return float(machine.device.matmul_s(bits, np.asarray(float(rows))))


def _update_bytes(job: Planned) -> float:
    """What an update reads and writes of memory: states and weights both ways, gradients once."""
    total, grad = 0.0, job.sizes.gradient.itemsize
    for unit, form in zip(job.sizes.stepped, job.sizes.forms, strict=True):
        total += 2 * sum(form.of_pieces(unit)) + 2 * unit.nbytes + grad * unit.count
    return total


def _summed_bytes(job: Planned) -> float:
    """What gradients read and write until they are sums, each micro-batch's added, and rounded."""
    dtypes, total = job.sizes.gradients, 0.0
    summed, rounding = dtypes.sums.itemsize, dtypes.sums.itemsize + dtypes.kept.itemsize
    for unit in job.sizes.stepped:
        own = 0 if unit.dtype.itemsize == 4 else unit.dtype.itemsize
        each = summed + job.sizes.micro_batches * (2 * summed + 2 * own)
        total += unit.count * (each + rounding * dtypes.rounds)
    return total
