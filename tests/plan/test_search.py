"""The search finds what trying everything finds; its bound holds, its bytes are exact."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import LinearConstraint, milp

from qoff.engine.simulated import simulated
from qoff.errors import ArgumentError, BudgetError
from qoff.kvcache import KVPlacement, KVQuant
from qoff.memory.plan import plan_residency
from qoff.plan import Memory, Plan
from qoff.plan.adapt import Load, RunningPlan
from qoff.plan.certify import Certified, Certifier, Counted, choices_of
from qoff.plan.cost import CostModel
from qoff.plan.explain import Explained
from qoff.plan.gpu import decided_on_gpu
from qoff.plan.machine import assumed_profile
from qoff.plan.native_sizes import NativeSizes
from qoff.plan.pareto import pareto_front
from qoff.plan.phase import Choices, round_seconds
from qoff.plan.processor import Processor
from qoff.plan.profile import Link, MachineProfile
from qoff.plan.program import Program, program
from qoff.plan.search import choices_for, find_plan
from qoff.plan.workload import Lengths, Workload
from qoff.quant import QuantConfig
from tests.tiny_families import FAMILIES, TINY

from .machines import GEMMA_27B, GIB, LLAMA_405B, MIB, MIXTURE, machine, mixture, sizes

LARGE_MIXTURE = MIXTURE | {
    "hidden_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_experts": 64,
    "moe_intermediate_size": 1024,
}
WORK = Workload(Lengths.of(256), Lengths.of(64), 24)


def everything(of: NativeSizes, on: MachineProfile, work: Workload) -> list[Certified]:
    """All choices, with the KV cache in steps of a quarter on each tier."""
    dtype = torch.float16 if on.on_gpu else torch.float32
    template = Plan(context=work.context)
    cost = CostModel(of, on, work, template.kv, dtype.itemsize)
    certifier = Certifier(cost, template, torch.device("cpu"), dtype)
    choices = choices_for(work, on.on_gpu)
    parts = [p for p in product((0, 0.25, 0.5, 0.75, 1), repeat=2) if sum(p) <= 1]
    parts = [p for p in parts if on.on_gpu or not p[0]]
    kept = [i for i in range(len(choices)) if choices.batch_size[i] in (1, 4, 12, 24)]
    kept = [i for i in kept if choices.batches[i] in (1, 2, 6) and choices.activations[i] == 0]
    kept = kept[:: 7 if on.on_gpu else 2]
    found = (certifier.certify(choices.one(i), *p) for i in kept for p in parts)
    return [one for one in found if one is not None]


@pytest.mark.parametrize(
    ("of", "on_gpu", "device"),
    [
        (sizes, False, 6 * MIB),
        (sizes, False, 14 * MIB),
        (sizes, True, 140 * MIB),
        (mixture, False, 12 * MIB),
    ],
    ids=["streams", "nearly fits", "GPU", "mixture"],
)
def test_no_plan_that_was_tried_is_better(
    of: Callable[[bool], NativeSizes], on_gpu: bool, device: int
) -> None:
    on, model = machine(on_gpu, device=device), of(on_gpu)
    best = find_plan(model, on, WORK)
    tried = everything(model, on, WORK)
    assert tried
    assert best.seconds <= 1.02 * min(one.seconds for one in tried)
    assert best.bound <= best.seconds
    assert all(best.bound <= 1.0001 * one.seconds for one in tried)


@pytest.mark.parametrize(("rate", "requests"), [(2e11, 1), (2e11, 24), (1e9, 24)])
def test_experts_in_host_memory_are_computed_there_where_that_is_faster(
    rate: float, requests: int
) -> None:
    """And virtual time agrees about how long it takes."""
    model = NativeSizes.of(LARGE_MIXTURE, QuantConfig(packing="split32"))
    on = replace(
        machine(True, device=model.nbytes // 3, host=2 * model.nbytes, disk=1000 * GIB),
        host=Processor.of(rate, 50 * rate, 1e-6),
        device=Processor.of(1e12, 1e14, 1e-6),
        to_device=Link(1e10, 1e-6),
        from_device=Link(1e10, 1e-6),
    )
    work = Workload(Lengths.of(256), Lengths.of(64), requests)
    best = find_plan(model, on, work)
    assert best.plan.cpu_experts == bool(best.residency.cpu_experts) == (rate > 1e10)
    assert best.bound <= best.seconds
    template = Plan(context=work.context, prefill_tokens=256)
    cost = CostModel(model, on, work, template.kv, 2)
    certifier = Certifier(cost, template, torch.device("cpu"), torch.float16)
    for size, batches, on_cpu in product((1, 4, 24), (1, 2), (False, True)):
        tried = replace(template, batch_size=size, batches=batches, cpu_experts=on_cpu)
        one = certifier.certify(choices_of(tried), host=0, disk=0)
        assert one is not None
        assert one.plan.cpu_experts == bool(one.residency.cpu_experts) == on_cpu
        assert best.bound <= 1.0001 * one.seconds
        assert best.seconds <= 1.02 * one.seconds or size * batches >= 2 * requests
    found = simulated(best, model, on, work)
    if best.plan.cpu_experts:
        assert found.decode.seconds == pytest.approx(best.decode.seconds, rel=0.25)
        assert found.prefill.seconds == pytest.approx(best.prefill.seconds, rel=0.25)
        here = RunningPlan(model, best.plan, best.memory, best.residency, on, torch.float16)
        seconds = [
            here.seconds(Load(requests, 1, 288), schedule) for schedule in ("block", "sequential")
        ]
        assert seconds == pytest.approx([best.decode.seconds] * 2, rel=0.1)
        said = list(Explained(model, on, work, best).warnings())
        assert any(f"{len(best.residency.cpu_experts)} of 512 experts" in one for one in said)
        assert best.seconds < 0.8 * min(
            one.seconds
            for size in (1, 4, 24)
            if (one := certifier.certify(choices_of(replace(template, batch_size=size)), 0, 0))
        )


def test_fewer_sequences_are_found_where_blocks_of_more_do_not_fit() -> None:
    """Their LPs say that a little of the KV cache on disk is enough; a block of each is not."""
    model = NativeSizes.of(GEMMA_27B, QuantConfig(packing="split32"))
    on = replace(
        assumed_profile(torch.device("cpu"), Path()),
        on_gpu=True,
        device=Processor.of(1e12, 1e14),
        to_device=Link(12e9, 1e-5),
        from_device=Link(12e9, 1e-5),
        usable={"device": 12 * GIB, "host": 16 * GIB, "disk": 1000 * GIB},
    )
    work = Workload()
    best = find_plan(model, on, work)
    template = Plan(context=work.context)
    cost = CostModel(model, on, work, template.kv, 2)
    certifier = Certifier(cost, template, torch.device("cpu"), torch.float16)
    fewer = replace(template, batch_size=32, batches=2)
    tried = certifier.certify(choices_of(fewer), host=1, disk=0)
    assert tried is not None
    assert best.seconds <= tried.seconds


def of_whole_units(lp: Program, units: int, blocks: int) -> float:
    """Seconds of the integer program: whole units and blocks, and all slots if a unit streams."""
    counts = np.array([units, units, blocks, blocks, 1, 1])
    rows = np.hstack([lp.rows / counts, np.zeros((len(lp.rows), 1))])
    on_device = 2  # the row after the two that parts are at most 1
    rows[on_device, :2] -= lp.slots / units
    rows[on_device, 6] = lp.slots
    streams = [1 / units, 1 / units, 0, 0, 0, 0, -1]
    found = milp(
        [*(lp.goal / counts), 0],
        constraints=LinearConstraint(np.vstack([rows, streams]), ub=[*lp.limits, 0]),
        integrality=[1, 1, 1, 1, 0, 0, 1],
    )
    return found.fun + lp.fixed if found.status == 0 else np.inf


def test_on_a_gpu_blocks_go_elsewhere_of_which_a_part_is_attended_to() -> None:
    """The CPU attends to that part of them. The forecast is as fast in virtual time."""
    on = machine(True, device=139 * MIB, host=32 * MIB)
    work = Workload(Lengths.of(3000), Lengths.of(32), 2)
    model, sparse = sizes(True), Plan(kv=KVQuant(attention_top=0.3))
    dense, best = find_plan(model, on, work), find_plan(model, on, work, sparse)
    for one in (dense, best):
        assert one.plan.kv_placement == KVPlacement(0, 1)
        assert one.plan.attends_on_cpu
    assert best.decode.busy["cpu"] == pytest.approx(0.3 * dense.decode.busy["cpu"])
    found = simulated(best, model, on, work)
    assert found.decode.seconds == pytest.approx(best.decode.seconds, rel=0.1)
    # Without room for what the CPU works in, all blocks are on the device, or nothing is.
    never = find_plan(model, machine(True, device=145 * MIB), work, sparse)
    assert never.plan.kv_placement.device_fraction == 1


@pytest.mark.parametrize(
    ("on_gpu", "device"), [(False, 7 * MIB), (False, 11 * MIB), (True, 138 * MIB)]
)
def test_integer_programs_of_all_choices_are_not_better(on_gpu: bool, device: int) -> None:
    """The search solves relaxed ones, of some choices.

    Not where memory is just short of all weights, whose pages take 2 % more than integer programs
    say of this model, nor where layers stream in tiles.
    """
    work = replace(WORK, requests=6)
    on, template = machine(on_gpu, device=device), Plan(context=work.context)
    best = find_plan(sizes(on_gpu), on, work)
    dtype = torch.float16 if on_gpu else torch.float32
    cost = CostModel(sizes(on_gpu), on, work, template.kv, dtype.itemsize)
    certifier = Certifier(cost, template, torch.device("cpu"), dtype)
    choices = choices_for(work, on_gpu)
    phases = cost.prefill(choices), cost.decode(choices)
    every = range(0, len(choices), 4 if on_gpu else 1)
    programs = [program(certifier, choices, index, *phases) for index in every]
    found = [
        of_whole_units(lp, cost.units, template.blocks_per_sequence)
        for lp in programs
        if lp is not None
    ]
    assert np.isfinite(found).sum() > 5
    assert best.bound <= 1.0001 * min(found)
    assert best.seconds <= 1.02 * min(found)


def test_where_an_index_chooses_blocks_come_to_the_gpu() -> None:
    config = {**TINY, **FAMILIES["deepseek-v3.2"]}
    of = NativeSizes.of(config, QuantConfig(packing="split32"))
    template = Plan(context=WORK.context, kv=KVQuant(window=16))
    plan = find_plan(of, machine(True, device=150 * MIB, host=GIB), WORK, template).plan
    assert plan.cpu_attention == "never"
    plan = replace(plan, kv_placement=KVPlacement(0.0, 0.5))
    assert decided_on_gpu(replace(plan, cpu_attention="auto"), of.spec) == plan
    with pytest.raises(ArgumentError, match="among tokens that are on the GPU"):
        decided_on_gpu(replace(plan, cpu_attention="always"), of.spec)


def test_bytes_are_those_of_the_placement() -> None:
    on = machine(device=6 * MIB)
    best = find_plan(sizes(), on, WORK)
    in_parts = best.residency.in_parts
    memory = Memory.of(best.plan, sizes().spec, sizes().shapes, in_parts, on.cores)
    left = memory.left("device", best.plan.device_memory)
    assert memory.purposes == best.memory.purposes
    assert plan_residency(sizes().checkpoint, left, packing="rows16") == best.residency
    used = best.bytes_by_tier()
    assert sum(used["device"].values()) + sum(used["host"].values()) <= 6 * MIB
    assert sum(best.weights.values()) >= best.weights["disk"] > 0


def test_a_model_that_fits_is_not_offloaded() -> None:
    best = find_plan(sizes(), machine(device=GIB), WORK)
    assert not best.offloads
    assert best.decode.limit == "cpu"


def test_plans_that_are_near_the_best_are_compared_in_virtual_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("qoff.plan.finalists._SIMULATION_S", np.inf)
    on, compared = machine(device=16 * MIB), list[Certified]()
    work = Workload(Lengths.of(128), Lengths.of(64), 8)

    def simulate(one: Certified) -> Certified:
        compared.append(one)
        return one

    best = find_plan(sizes(), on, work, simulate=simulate)
    assert len({(one.plan.batch_size, one.plan.batches) for one in compared}) > 1
    assert all(one.seconds <= 1.1 * best.seconds for one in compared if one.plan.slots == 2)


def test_where_reads_take_turns_with_computing_there_is_a_slot_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("qoff.plan.finalists._SIMULATION_S", np.inf)
    on = replace(machine(device=8_280_000), disk_read=Link(3e9, 1e-4, 1e-10))
    work = replace(WORK, objective="latency")

    def simulate(one: Certified) -> Certified:
        return simulated(one, sizes(), on, work)

    best = find_plan(sizes(), on, work, simulate=simulate)
    two = find_plan(sizes(), on, work)
    assert (two.plan.slots, best.plan.slots) == (2, 3)
    assert best.simulated is not None
    assert best.simulated.seconds < 0.99 * simulate(two).seconds
    assert sum(sum(used.values()) for used in best.bytes_by_tier().values()) <= 8 * MIB


@pytest.mark.parametrize("on_gpu", [False, True])
def test_searches_that_share_what_they_counted_find_the_same(
    on_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On machines with other rates, or more host memory beside a GPU, and count less."""
    on = machine(on_gpu, device=(140 if on_gpu else 6) * MIB)
    disk = replace(on.disk_read, bytes_per_s=2 * on.disk_read.bytes_per_s)
    calls, count = list[Plan](), NativeSizes.memory_of

    def counting(self: NativeSizes, plan: Plan, *where: Any) -> Memory:
        calls.append(plan)
        return count(self, plan, *where)

    monkeypatch.setattr(NativeSizes, "memory_of", counting)
    counted: Counted = {}
    more = {"host": 64 * MIB} if on_gpu else {}
    for other in (on, on, replace(on, disk_read=disk), on.with_memory(**more)):
        alone = find_plan(sizes(on_gpu), other, WORK)
        needed, first = len(calls), not counted
        calls.clear()
        shared = find_plan(sizes(on_gpu), other, WORK, counted=counted)
        assert (shared.plan, shared.seconds) == (alone.plan, alone.seconds)
        assert shared.memory.purposes == alone.memory.purposes
        assert first or len(calls) < needed / 2
        calls.clear()


def test_more_memory_is_never_slower() -> None:
    seconds = [find_plan(sizes(), machine(device=n * MIB), WORK).seconds for n in (6, 8, 12, 40)]
    assert all(a >= 0.98 * b for a, b in pairwise(seconds))


def test_a_bound_on_latency_makes_batches_smaller() -> None:
    on = machine(device=GIB)
    free = find_plan(sizes(), on, WORK)
    bound = find_plan(sizes(), on, replace(WORK, token_s=free.decode.seconds / 2))
    assert bound.decode.seconds <= free.decode.seconds / 2
    alone = find_plan(sizes(), on, replace(WORK, objective="latency"))
    assert alone.plan.batch_size * alone.plan.batches == 1


def test_a_model_far_larger_than_the_machine_is_offloaded() -> None:
    large = NativeSizes.of(LLAMA_405B)
    on = machine(True, device=24 * GIB, host=64 * GIB, disk=1000 * GIB)
    assert find_plan(large, on, Workload()).offloads


@pytest.mark.parametrize("on_gpu", [False, True])
def test_what_is_too_small_is_one_line_with_the_bytes_that_are_enough(on_gpu: bool) -> None:
    with pytest.raises(BudgetError, match=r"device memory: .* more than the .* there") as refusal:
        find_plan(sizes(on_gpu), machine(on_gpu, device=MIB, host=64 * MIB * on_gpu), WORK)
    assert "\n" not in str(refusal.value)


def test_a_context_that_the_model_does_not_have_is_refused() -> None:
    config = {**LLAMA_405B, "model_type": "opt", "ffn_dim": 96, "hidden_size": 256}
    config |= {"num_attention_heads": 4, "num_hidden_layers": 1, "max_position_embeddings": 128}
    opt = NativeSizes.of(config, QuantConfig(group_size=32))
    with pytest.raises(ArgumentError, match="up to 128 tokens"):
        find_plan(opt, machine(), WORK)


def test_a_round_is_the_busiest_resource_and_one_unit_of_the_others() -> None:
    assert round_seconds(np.array([3.0, 1.0, 2.0]), 3) == pytest.approx(4.0)


def test_reads_take_time_from_what_the_cpu_computes() -> None:
    """A disk that is never the limit still makes rounds longer."""
    on = machine(device=GIB)
    fast = replace(on, disk_read=Link(1e15, 0.0, 0.0))
    costly = replace(fast, disk_read=replace(fast.disk_read, cpu_s_per_byte=1e-9))
    seconds = []
    for one in (fast, costly):
        cost = CostModel(sizes(), one, WORK, KVQuant(), 4)
        choices = choices_for(WORK, False).one(0)
        phase = cost.decode(choices)
        busy = phase.busy(np.array([[0.0, 1.0, 0.0, 0.0]]))
        seconds.append(round_seconds(busy, phase.units))
    wanted = cost.weight_bytes * 1e-9 / on.cores
    assert seconds[1] - seconds[0] == pytest.approx(wanted)


def test_each_layer_attends_in_its_own_form() -> None:
    by_layer = dict.fromkeys(range(sizes().spec.num_layers), (8, 8))
    found, wanted = (
        CostModel(sizes(), machine(), WORK, kv, 4).decode(choices_for(WORK, False))
        for kv in (KVQuant(2, 2, layers=by_layer), KVQuant(8, 8))
    )
    assert found.base == pytest.approx(wanted.base)


def test_the_sequential_schedule_reads_the_weights_for_each_batch() -> None:
    cost = CostModel(sizes(), machine(), WORK, KVQuant(), 4)
    both = Choices(
        np.array([4.0, 4.0]),
        np.array([6.0, 6.0]),
        np.array([256.0, 256.0]),
        np.array([True, False]),
        np.array([True, True]),
        np.array([0, 0]),
        np.array([False, False]),
    )
    each = cost.decode(both).each[:, 0, 1]
    assert each[1] == pytest.approx(6 * each[0])


@pytest.mark.parametrize("value", ["", "0", "9-3", "-4", [], [1.5], None])
def test_lengths_that_are_none_are_refused(value: object) -> None:
    with pytest.raises(ArgumentError):
        Lengths.of(value)  # type: ignore[arg-type]


def test_more_memory_on_the_front_is_faster() -> None:
    front = pareto_front(sizes(), machine(device=12 * MIB), WORK)
    assert len(front) > 1
    assert all(a.memory < b.memory and a.tokens_per_s < b.tokens_per_s for a, b in pairwise(front))
    with pytest.raises(BudgetError):
        pareto_front(sizes(), machine(device=MIB), WORK)


@pytest.mark.parametrize(("of", "most", "layers"), [(mixture, 20, 10), (sizes, 12, 12)])
@pytest.mark.parametrize("fewer", [0, 1])
def test_too_many_layers_of_passes_are_not_simulated(
    of: Callable[[], NativeSizes],
    most: int,
    layers: int,
    fewer: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert of().spec.num_layers == layers
    monkeypatch.setattr("qoff.plan.finalists.LAYER_PASSES", most - fewer)
    asked = list[Certified]()

    def simulate(one: Certified) -> Certified:
        asked.append(one)
        return one

    alone = Workload(Lengths.of(64), Lengths.of(16), 1)
    best = find_plan(of(), machine(device=9 * MIB), alone, simulate=simulate)
    assert (best.hits is not None) == (of is mixture)
    assert (best.simulated is None) == (not asked) == bool(fewer)
