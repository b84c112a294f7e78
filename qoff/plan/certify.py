"""The exact bytes and the forecast of one plan: what the search proposes is counted as it runs."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeAlias

import numpy as np
import torch

from qoff.errors import BudgetError
from qoff.kvcache.store.placement import DEVICE, DISK, HOST, TIERS, KVPlacement
from qoff.memory.plan import Residency, plan_residency

from .calls import as_used
from .cost import CostModel
from .manual import Memory, Plan
from .mixture import Array
from .phase import PLACED, RESOURCES, Choices, Phase, round_seconds
from .sweeps import Sweeps

_NEAREST = TIERS[::-1]  # of hidden states, in the order of `Choices.activations`
_NOT_COUNTED = frozenset({"host_memory", "token_s", "adapt"})  # fields of a plan
STAGING = 2  # buffers in host memory beside a GPU

Counted: TypeAlias = dict[Hashable, Memory]


@dataclass(frozen=True)
class Forecast:
    """A round of a phase: seconds, those that each resource is busy, and tokens of the phase.

    idle: seconds that each waits while none of its work is wanted.
    """

    rounds: float
    seconds: float
    busy: Mapping[str, float]
    tokens: float
    idle: Mapping[str, float]

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second, of all sequences together."""
        return self.tokens / (self.rounds * self.seconds) if self.tokens else 0.0

    @property
    def limit(self) -> str:
        """The busiest resource."""
        return max(self.busy, key=lambda name: self.busy[name])


@dataclass(frozen=True)
class Certified:
    """A plan that fits, with its exact bytes and what is forecast of it.

    bound: seconds that no plan of this machine and workload is faster than, by the same model.
    simulated: the same plan with rounds as long as in virtual time. hits: the part of the experts
    that decoding wants and the device has, where they come one by one.
    """

    plan: Plan
    memory: Memory
    residency: Residency
    weights: Mapping[str, int]  # bytes by tier that they are read from
    prefill: Forecast
    decode: Forecast
    bound: float = 0.0
    simulated: Certified | None = None
    hits: float | None = None

    @property
    def seconds(self) -> float:
        """Seconds of the whole workload."""
        return sum(p.rounds * p.seconds for p in (self.prefill, self.decode))

    @cached_property
    def offloads(self) -> bool:
        """Whether anything is moved during a round."""
        moved = self.weights[HOST] + self.weights[DISK] > 0
        return moved or self.plan.kv_placement.device_fraction < 1

    def bytes_by_tier(self) -> dict[str, dict[str, int]]:
        """Bytes by tier and purpose, weights and their slots included."""
        own = {DEVICE: self.residency.device_bytes, HOST: self.residency.host_bytes, DISK: 0}
        return {tier: {"weights": own[tier], **self.memory.purposes[tier]} for tier in own}


def choices_of(plan: Plan) -> Choices:
    """The discrete parts of a plan, as an array of one."""
    return Choices(
        np.array([float(plan.batch_size)]),
        np.array([float(plan.batches)]),
        np.array([float(plan.prefill_tokens)]),
        np.array([plan.schedule == "block"]),
        np.array([plan.attends_on_cpu]),
        np.array([_NEAREST.index(plan.activations)]),
        np.array([plan.cpu_experts]),
    )


@dataclass(frozen=True)
class Certifier:
    """Counts plans for a model on a machine. template: fields of a plan that are not searched.

    counted: what plans of the model were found to take, for searches of machines with other rates.
    """

    cost: CostModel
    template: Plan
    device: torch.device  # what working space is counted for
    dtype: torch.dtype
    counted: Counted = field(default_factory=dict)

    @property
    def packing(self) -> str:
        """Of weights on the device."""
        return "split32" if self.cost.machine.on_gpu else "rows16"

    def kv_stays(self, c: Choices) -> bool:
        """Whether all of the KV cache is on the device, as `check_gpu_plan` asks of one element.

        So is what nothing of is packed.
        """
        sparse = self.cost.machine.on_gpu and self.template.kv.attention_top < 1
        return not self.cost.sizes.shapes or (sparse and not c.attends_on_cpu[0])

    def memory_of(self, plan: Plan, tiled: bool = False) -> Memory:
        """What a plan takes beside the weights."""
        fields = (value for name, value in vars(plan).items() if name not in _NOT_COUNTED)
        key = (tiled, *fields)
        found = self.counted.get(key)
        if found is None:
            on = self.cost.machine
            how = on.on_gpu, self.device, self.dtype, tiled, on.cores
            found = self.counted[key] = self.cost.sizes.memory_of(plan, *how)
        return found

    def plan_of(self, c: Choices, host: float = 0.0, disk: float = 0.0) -> Plan:
        """The plan of one element of `c`, with these parts of the KV cache off the device.

        With none where it stays.
        """
        usable, on_gpu = self.cost.machine.usable, self.cost.machine.on_gpu
        together = int(c.batches[0]) if c.block[0] else 1
        plan = replace(
            self.template,
            device_memory=usable[DEVICE],
            host_memory=usable[HOST] if on_gpu else None,
            batch_size=int(c.batch_size[0]),
            batches=int(c.batches[0]),
            prefill_tokens=int(c.prefill_tokens[0]),
            schedule="block" if c.block[0] else "sequential",
            cpu_attention="auto" if c.attends_on_cpu[0] else "never",
            cpu_experts=bool(c.cpu_experts[0]),
            cpu_expert_tokens=self.cost.cpu_expert_tokens(together) if c.cpu_experts[0] else None,
            activations=_NEAREST[int(c.activations[0])],
            token_s=self.cost.workload.token_s,
        )
        return _placed(plan, 0.0, 0.0) if self.kv_stays(c) else _placed(plan, host, disk)

    def certify(self, c: Choices, host: float, disk: float) -> Certified | None:
        """The plan of one element of `c`, its KV cache moved off the device as far as it must be.

        None where no such plan fits.
        """
        plan, machine = self.plan_of(c, host, disk), self.cost.machine
        blocks = max(1, plan.blocks_per_sequence)
        for _ in range(_TRIES):
            found = self.fit(plan)
            if isinstance(found, tuple):
                return self.forecast(c, *found)
            split = plan.kv_placement.split(blocks)
            on_host, off = split[HOST], blocks - split[DEVICE]
            step = max(1, (split[DEVICE] if found == DEVICE else on_host) // 8)
            if self.kv_stays(c):
                return None
            if found == DEVICE and split[DEVICE]:
                off = min(blocks, off + step)  # they go where the others are
                on_host = off if machine.on_gpu and not split[DISK] else on_host
            elif found == HOST and on_host:
                on_host = max(0, on_host - step)
            else:
                return None
            plan = _placed(plan, on_host / blocks, (off - on_host) / blocks)
        return None

    def fit(self, plan: Plan) -> tuple[Plan, Memory, Residency] | str:
        """The plan with its bounds, and its bytes; or the tier that it is too large for."""
        machine, sizes = self.cost.machine, self.cost.sizes
        memory = self.memory_of(plan)
        for tiled in (False, True):
            if memory.total(DISK) > machine.usable[DISK]:
                return DISK
            bound = machine.usable[DEVICE] - (0 if machine.on_gpu else memory.total(HOST))
            plan = replace(plan, device_memory=max(0, bound))
            try:
                left = memory.left(DEVICE, plan.device_memory)
            except BudgetError:
                return DEVICE
            try:
                on_host = memory.left(HOST, plan.host_memory)
            except BudgetError:
                return HOST
            try:
                residency = plan_residency(
                    sizes.checkpoint,
                    left,
                    plan.slots,
                    packing=self.packing,
                    host_memory=on_host,
                    host_staging=STAGING if machine.on_gpu else 0,
                    layouts=sizes.layouts(self.packing),
                    in_place=not machine.on_gpu,
                    one_by_one=sizes.one_by_one,
                    cpu_experts=plan.cpu_experts,
                    passing_from=plan.passing_from,
                )
            except BudgetError as error:
                return HOST if str(error).startswith(HOST) else DEVICE
            if plan.cpu_experts and residency.streamed:  # host memory is for experts then
                return DEVICE
            if plan.cpu_experts and not residency.cpu_experts:
                return HOST
            if tiled or not residency.in_parts:
                return plan, memory, residency
            memory = self.memory_of(plan, tiled=True)
        raise AssertionError("layers in tiles were counted")

    def forecast(self, c: Choices, plan: Plan, memory: Memory, residency: Residency) -> Certified:
        """What is forecast of a plan with these bytes."""
        cost = self.cost
        weights = self._weights(residency)
        placed = self._parts(plan, weights)
        work = cost.workload
        drafted = plan.draft_tokens if work.acceptance else 0
        prefill, decode = cost.prefill(c), cost.decode(c, drafted)
        count = work.at_once
        machine = as_used(cost.machine, cost.sizes, plan.activations)
        saved = min(1.0, _kept(residency) / max(1, weights[HOST]))
        saved *= cost.machine.to_device.bytes_per_s / cost.machine.from_device.bytes_per_s

        def forecast(phase: Phase, tokens: float) -> Forecast:
            sweeps = Sweeps(machine, residency, 1.0 if c.block[0] else float(phase.passes[0]))
            return _forecast(phase, placed, sweeps, count * tokens, saved)

        return Certified(
            plan,
            memory,
            residency,
            weights,
            forecast(prefill, work.prompt.mean),
            forecast(decode, work.answer.mean),
            hits=self._hits(residency, c, decode, 1 + drafted),
        )

    def _hits(self, residency: Residency, c: Choices, decode: Phase, each: int) -> float | None:
        """The part of the experts that a round of decoding wants and the device has.

        each: tokens of a sequence.
        """
        mixture = self.cost.mixture
        if mixture is None or not residency.expert_slots:
            return None
        held = residency.expert_slots / (mixture.total - len(residency.cpu_experts))
        tokens = each * self.cost.active(c) / np.where(c.block, 1.0, decode.passes)
        return float(mixture.hits(np.array([held]), tokens)[0, 0])

    def placed(self, plan: Plan, residency: Residency) -> Array:
        """The parts of weights and KV cache that are off the device, [1, PLACED]."""
        return self._parts(plan, self._weights(residency))

    def _parts(self, plan: Plan, weights: Mapping[str, int]) -> Array:
        whole = self.cost.weight_bytes
        blocks = max(1, plan.blocks_per_sequence)
        split = plan.kv_placement.split(blocks)
        parts = [weights[HOST] / whole, weights[DISK] / whole]
        return np.array([[*parts, split[HOST] / blocks, split[DISK] / blocks]])

    def _weights(self, residency: Residency) -> dict[str, int]:
        """Bytes of weights that are away from the device, by the tier that has them."""
        streamed = {HOST: 0, DISK: 0}
        for unit, nbytes in residency.streamed.items():
            streamed[HOST if unit in residency.host else DISK] += nbytes
        experts = self.cost.sizes.experts
        if residency.expert_slots and experts is not None:
            count = experts.count * sum(experts.layers)
            missed = 1 - residency.expert_slots / count
            of_all = self.cost.sizes.expert_bytes * count
            held = max(0, residency.host_weight_bytes - streamed[HOST])
            on_cpu = len(residency.cpu_experts) / count * of_all
            elsewhere = _kept(residency) + math.ceil(on_cpu)  # none of these is on the device
            kept = min(elsewhere, int(missed * of_all))
            streamed[HOST] += int(missed * held) + kept
            streamed[DISK] += max(0, int(missed * (of_all - held)) - kept)
        resident = max(0, self.cost.weight_bytes - streamed[HOST] - streamed[DISK])
        return {DEVICE: resident, **streamed}


def _kept(residency: Residency) -> int:
    """Bytes of the slots in host memory for experts that left the device."""
    return residency.host_expert_slots * residency.expert_bytes


_TRIES = 24


def _placed(plan: Plan, host: float, disk: float) -> Plan:
    """The plan with its KV cache in whole blocks of a sequence on each tier."""
    blocks = max(1, plan.blocks_per_sequence)
    on_host = min(blocks, round(host * blocks))
    on_disk = min(blocks - on_host, round(disk * blocks))
    device = 1.0 if on_host + on_disk == 0 else (blocks - on_host - on_disk) / blocks
    return replace(plan, kv_placement=KVPlacement(device, on_host / blocks))


def _forecast(phase: Phase, placed: Array, sweeps: Sweeps, tokens: float, saved: float) -> Forecast:
    """saved: seconds of the link back, in those that weights in host memory take to the device: an
    expert that comes from a slot there leaves it to one from the device.
    """
    busy = phase.busy(placed) + sweeps.asked(phase, placed)
    host = PLACED.index("weights on host")
    to_device = phase.each[:, RESOURCES.index("to device"), host] * phase.moved(placed)[:, host]
    busy[:, RESOURCES.index("from device")] += saved * to_device
    idle = sweeps.idle(phase, placed)
    seconds = round_seconds(busy + idle, phase.units)
    named, waits = (dict(zip(RESOURCES, map(float, x[0]), strict=True)) for x in (busy, idle))
    return Forecast(float(phase.rounds[0]), float(seconds[0]), named, tokens, waits)
