from __future__ import annotations

import re
from collections import Counter
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qoff.checkpoint import Checkpoint
from qoff.errors import BudgetError
from qoff.memory import WeightStore, plan_residency, residency_of
from qoff.memory.arena import PAGE
from qoff.memory.plan import HEAD, Layouts, layouts, streamed_images, tiles, unit_weights
from qoff.plan.native_sizes import NativeSizes
from qoff.quant import QuantConfig
from tests.memory.checkpoints import all_names, units_of, write_checkpoint
from tests.plan.machines import SMALL

PACKINGS = ["rows16", "split32"]


@pytest.fixture(scope="module", params=[(p, t) for p in PACKINGS for t in (True, False)], ids=str)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Checkpoint:
    packing, tied = request.param
    path = tmp_path_factory.mktemp("ck") / "model"
    return write_checkpoint(path, layers=5, packing=packing, tied=tied, scale=3)


def least(checkpoint: Checkpoint, slots: int, workspace: int) -> int:
    """The smallest budget that is accepted, as told by the refusal of none at all."""
    with pytest.raises(BudgetError) as refused:
        plan_residency(checkpoint, 0, slots, workspace)
    found = re.search(r"at least ([\d,]+)", str(refused.value))
    assert found is not None
    return int(found[1].replace(",", ""))


@given(share=st.floats(0, 1.2), slots=st.sampled_from([2, 3]), workspace=st.integers(0, 10_000))
def test_no_plan_exceeds_its_budget_and_no_store_its_plan(
    checkpoint: Checkpoint, share: float, slots: int, workspace: int
) -> None:
    everything = residency_of(checkpoint, all_names(checkpoint), slots, workspace)
    budget = int(everything.device_bytes * share)
    if budget < least(checkpoint, slots, workspace):
        numbers = f"take {everything.device_bytes:,} bytes, and the budget is {budget:,};"
        with pytest.raises(BudgetError, match=numbers) as refusal:
            plan_residency(checkpoint, budget, slots, workspace)
        mostly = 2 * workspace > least(checkpoint, slots, workspace)
        assert ("shorter sequences" in str(refusal.value)) == mostly
        return
    plan = plan_residency(checkpoint, budget, slots, workspace)
    assert plan.device_bytes <= budget
    with WeightStore(checkpoint, plan) as store:
        for unit in units_of(store) * 2:
            with store.use(unit):
                pass
        assert store.stats.arena_peak == plan.device_bytes - workspace
        assert store.stats.arena_peak <= budget - workspace


def test_more_memory_never_streams_more(checkpoint: Checkpoint) -> None:
    everything = residency_of(checkpoint, all_names(checkpoint)).device_bytes
    budgets = range(least(checkpoint, 2, 0), everything + 1, everything // 60)
    plans = [plan_residency(checkpoint, budget) for budget in budgets]
    with_head = [p for p in plans if set(unit_weights(HEAD, checkpoint.outer)) <= p.resident]
    images = [streamed_images(checkpoint, plan).values() for plan in with_head]
    streamed = [sum(image.raw_bytes for image in some) for some in images]
    assert len(with_head) > 10
    assert streamed == sorted(streamed, reverse=True)


def test_the_least_budget_is_exact(checkpoint: Checkpoint) -> None:
    minimum = least(checkpoint, 2, 100)
    assert plan_residency(checkpoint, minimum, 2, 100).device_bytes <= minimum
    with pytest.raises(BudgetError):
        plan_residency(checkpoint, minimum - 1, 2, 100)


def test_without_a_budget_everything_stays(checkpoint: Checkpoint) -> None:
    plan = plan_residency(checkpoint, None)
    assert plan.resident == set(all_names(checkpoint))
    assert (plan.slots, plan.slot_bytes) == (0, 0)
    assert plan_residency(checkpoint, plan.device_bytes) == plan


def test_every_layer_streams_one_range_and_about_as_much(checkpoint: Checkpoint) -> None:
    everything = residency_of(checkpoint, all_names(checkpoint)).device_bytes
    for budget in range(least(checkpoint, 2, 0), everything, everything // 20):
        plan = plan_residency(checkpoint, budget)
        if plan.tiles:
            continue
        streamed = streamed_images(checkpoint, plan)
        images = [streamed.get(unit) for unit in range(len(checkpoint.layers))]
        streaming = [image for image in images if image is not None]
        assert all(len(image.ranges) == 1 for image in streaming)
        counts = [len(image.raw) if image is not None else 0 for image in images]
        assert max(counts) - min(counts) <= 1


def test_fewer_than_two_slots_are_refused(checkpoint: Checkpoint) -> None:
    with pytest.raises(ValueError, match="too few"):
        plan_residency(checkpoint, None, slots=1)


def test_unknown_names_are_refused(checkpoint: Checkpoint) -> None:
    with pytest.raises(ValueError, match=r"model\.layers\.99\.x"):
        residency_of(checkpoint, ["model.layers.99.x"])


def test_layers_that_lie_alike_are_laid_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of 96 layers lay out no more than of 24, and no strip of scales of any tile."""
    laid_out = Mock(wraps=layouts.plan_unit)
    monkeypatch.setattr(layouts, "plan_unit", laid_out)
    monkeypatch.setattr(tiles, "_strips", Mock(side_effect=AssertionError("for reads alone")))
    counts = []
    for layers in (24, 96):
        laid_out.reset_mock()
        config = SMALL | {"num_hidden_layers": layers, "intermediate_size": 8192}
        checkpoint = NativeSizes.of(config, QuantConfig(packing="split32")).checkpoint
        shared = Layouts(checkpoint, "rows16")
        for budget in (3 << 20, 4 << 20, 3 << 20):
            plan = plan_residency(checkpoint, budget, host_memory=8 << 20, layouts=shared)
            assert plan.device_bytes <= budget
            assert len(plan.tiled_layers) == layers
        counts.append(laid_out.call_count)
    assert counts[1] <= 1.2 * counts[0]


def mixture_of_experts(packing: str = "rows16") -> Checkpoint:
    """12 layers of 16 experts."""
    mixture = {"model_type": "qwen3_moe", "num_experts": 16, "num_experts_per_tok": 2}
    mixture |= {"moe_intermediate_size": 128, "norm_topk_prob": True, "decoder_sparse_step": 1}
    config = {**SMALL, **mixture, "mlp_only_layers": []}
    return NativeSizes.of(config, QuantConfig(packing=packing)).checkpoint


def test_experts_for_the_cpu_are_spread_over_the_layers() -> None:
    checkpoint = mixture_of_experts("split32")
    everything = residency_of(checkpoint, all_names(checkpoint), packing="split32").device_bytes
    for tenths, host in ((3, everything // 4), (5, everything // 3), (7, 1 << 40)):
        plan = plan_residency(
            checkpoint,
            everything * tenths // 10,
            packing="split32",
            host_memory=host,
            cpu_experts=True,
        )
        layers = Counter(one.layer for one in plan.cpu_experts)
        assert plan.host_bytes <= host
        assert not plan.host_expert_slots
        assert len(layers) == 12
        assert max(layers.values()) - min(layers.values()) <= 1
        away = 12 * 16 - plan.expert_slots
        assert plan.cpu_experts
        assert len(plan.cpu_experts) == away or host - plan.host_bytes < 2 * plan.expert_bytes
    assert len(plan.cpu_experts) == away


def test_experts_for_the_cpu_have_room_to_pass_through_the_device() -> None:
    """In groups as large as there is room for; without any, the least is named, and is enough."""
    checkpoint = mixture_of_experts("split32")
    names = all_names(checkpoint)
    everything = residency_of(checkpoint, names, packing="split32").device_bytes
    how: dict[str, Any] = {"packing": "split32", "host_memory": 1 << 40, "cpu_experts": True}
    with pytest.raises(BudgetError) as refused:
        plan_residency(checkpoint, PAGE, **how, passing_from=100)
    found = re.search(r"at least ([\d,]+)", str(refused.value))
    assert found is not None
    least = int(found[1].replace(",", ""))
    assert "for experts that pass through the device): raise the budget" in str(refused.value)
    assert str(refused.value).endswith("experts of longer passes (cpu_expert_tokens)")
    together = list[int]()
    for budget in range(least, everything, everything // 20):
        plan = plan_residency(checkpoint, budget, **how, passing_from=100)
        alone = plan_residency(checkpoint, budget, **how)
        assert plan.device_bytes <= budget
        assert alone.passing == alone.passing_bytes == 0
        assert alone.passing_from is None
        assert plan.passing_from == 100
        assert plan.passing_bytes >= 3 * plan.passing * plan.cpu_expert_bytes // len(
            plan.cpu_experts
        )
        together.append(plan.passing)
    assert together == sorted(together)
    assert together[0] == 1
    assert together[-1] == 16


def test_host_memory_holds_no_more_slots_than_experts_that_are_elsewhere() -> None:
    checkpoint = mixture_of_experts()
    everything = residency_of(checkpoint, all_names(checkpoint)).device_bytes
    plan = plan_residency(checkpoint, everything * 9 // 10, host_memory=1 << 40)
    assert not plan.host_expert_slots  # all are sources there
    for tenths in range(3, 10):
        budget = everything * tenths // 10
        plan = plan_residency(checkpoint, budget, host_memory=everything * 3 // 4)
        away = 12 * 16 - plan.expert_slots
        assert 0 < plan.host_expert_slots <= away + 16
        kept = plan.host_expert_slots * plan.expert_bytes
        assert kept + plan.expert_bytes > everything * 3 // 4 or plan.host_expert_slots >= away
