"""Experts in host memory: who computes them for passes of how many tokens, and what that takes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from qoff.engine.simulated.run import simulated
from qoff.plan import Plan
from qoff.plan.certify import Certified, Certifier, choices_of
from qoff.plan.cost import CostModel
from qoff.plan.explain import Explained
from qoff.plan.native_sizes import NativeSizes
from qoff.plan.processor import Processor
from qoff.plan.profile import Link, MachineProfile
from qoff.plan.search import find_plan
from qoff.plan.workload import Lengths, Workload
from qoff.quant import QuantConfig
from tests.plan.machines import GIB, machine
from tests.plan.test_search import LARGE_MIXTURE

MODEL = NativeSizes.of(LARGE_MIXTURE, QuantConfig(packing="split32"))
NEVER = 1 << 14  # tokens of a pass that bring experts


def on(link: float = 2e10, host: float = 2e11) -> MachineProfile:
    """A GPU that has room for a third of the model."""
    return replace(
        machine(True, device=MODEL.nbytes // 3, host=2 * MODEL.nbytes, disk=1000 * GIB),
        host=Processor.of(host, 10 * host, 1e-6),
        device=Processor.of(1e12, 1e14, 1e-6),
        to_device=Link(link, 1e-6),
        from_device=Link(link, 1e-6),
    )


def cost(
    machine: MachineProfile, prompt: int = 256, tokens: int | None = None, prompts: int = 1
) -> CostModel:
    work = Workload(Lengths.of(prompt), Lengths.of(64), prompts)
    return CostModel(MODEL, machine, work, Plan().kv, 2, cpu_tokens=tokens)


def certified(
    plan: Plan, prompt: int, machine: MachineProfile, piece: int | None = None
) -> Certified:
    """A prompt for each batch. piece: of a prompt, that a pass reads; None: all of it."""
    of = cost(machine, prompt, plan.cpu_expert_tokens, plan.batches)
    template = replace(plan, context=of.workload.context, prefill_tokens=piece or prompt)
    certifier = Certifier(of, template, torch.device("cpu"), torch.float16)
    found = certifier.certify(choices_of(template), host=0, disk=0)
    assert found is not None
    return found


def test_a_faster_link_and_a_slower_cpu_bring_experts_for_fewer_tokens() -> None:
    by_link = [cost(on(link=rate)).cpu_expert_tokens(1) for rate in (1e7, 5e9, 2e10, 5e10, 1e15)]
    by_cpu = [cost(on(host=rate)).cpu_expert_tokens(1) for rate in (1e7, 1e11, 2e11, 4e11, 1e15)]
    assert by_link == sorted(by_link, reverse=True)
    assert by_cpu == sorted(by_cpu)
    assert by_cpu[0] == 0
    assert min(by_link[0], by_cpu[-1]) > 4096  # where what the CPU gives takes the link as long
    assert 0 < by_link[2] == by_cpu[2] < 1024
    assert cost(on(), tokens=5).cpu_expert_tokens(1) == 5


@pytest.mark.parametrize("bits", [3, 4, 6])
def test_repacking_reads_and_writes_what_is_allocated(bits: int) -> None:
    sizes = NativeSizes.of(LARGE_MIXTURE, QuantConfig(bits=bits, packing="split32"))
    here = CostModel(sizes, on(), Workload(), Plan().kv, 2)
    layouts, moved = sizes.layouts("split32"), 0
    for layer in (*layouts.experts, *layouts.on_cpu.experts):
        if layer.count:
            size = layer.count, layer.nbytes
            for one in layer.in_slots(torch.empty(size, dtype=torch.uint8, device="meta")):
                moved += one.count * (one.codes[0].nbytes + one.scale_min[0].nbytes)
    experts = here._host_experts
    assert experts is not None
    seconds = experts.repack_s(np.array(experts.nbytes))
    assert seconds == pytest.approx(moved / here.machine.device.bytes_per_s)


def test_passes_that_share_what_comes_have_it_brought_for_fewer_tokens() -> None:
    alone, *shared = (cost(on()).cpu_expert_tokens(passes) for passes in (1, 4, 16))
    assert alone > shared[0] > shared[1]
    plan = Plan(batch_size=1, batches=4, cpu_experts=True)
    for schedule, most in (("block", shared[0]), ("sequential", alone)):
        found = certified(replace(plan, schedule=schedule), 256, on())
        assert found.plan.cpu_expert_tokens == most
        for tokens in (0, NEVER):
            other = certified(replace(found.plan, cpu_expert_tokens=tokens), 256, on())
            assert found.prefill.seconds <= 1.01 * other.prefill.seconds


def test_who_computes_is_who_is_faster() -> None:
    plan, most = Plan(batch_size=1, cpu_experts=True), cost(on()).cpu_expert_tokens(1)
    for prompt, brings in ((most // 2, False), (2 * most, True)):
        passes = certified(replace(plan, cpu_expert_tokens=0), prompt, on())
        leaves = certified(replace(plan, cpu_expert_tokens=NEVER), prompt, on())
        found = certified(plan, prompt, on())
        assert (passes.prefill.seconds < leaves.prefill.seconds) == brings
        assert found.plan.cpu_expert_tokens == most
        assert (found.plan.passing_from == most + 1) == bool(found.residency.passing) == brings
        assert found.prefill.busy["to device"] == pytest.approx(
            (passes if brings else leaves).prefill.busy["to device"], rel=0.02
        )
        assert found.memory.total("host") <= leaves.memory.total("host")


@pytest.mark.parametrize("schedule", ["block", "sequential"])
def test_virtual_time_agrees_about_prompts_that_bring_experts(schedule: str) -> None:
    plan = Plan(batch_size=1, batches=2, cpu_experts=True, cpu_expert_tokens=64)
    plan = replace(plan, schedule=schedule)  # type: ignore[arg-type]
    found = certified(plan, 512, on())
    work = Workload(Lengths.of(512), Lengths.of(64), 2)
    timed = simulated(found, MODEL, on(), work)
    assert found.residency.passing_from == 65
    assert timed.prefill.seconds == pytest.approx(found.prefill.seconds, rel=0.1)


def test_a_plan_for_long_prompts_brings_experts_for_them_alone() -> None:
    work = Workload(Lengths.of(1024), Lengths.of(64), 1)
    best = find_plan(MODEL, on(), work)
    assert best.plan.cpu_experts
    assert best.plan.passing_from is not None
    assert best.bound <= best.seconds
    for cpu_experts, tokens in ((False, None), (True, NEVER), (True, 0)):
        tried = replace(best.plan, cpu_experts=cpu_experts, cpu_expert_tokens=tokens)
        assert best.seconds < certified(tried, 1024, on(), best.plan.prefill_tokens).seconds
    said = list(Explained(MODEL, on(), work, best).warnings())
    assert any("longer ones bring them to the GPU" in one for one in said)
