"""Plans of models whose layers have windows: what they keep is counted, and leaves room."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qoff.engine.simulated import Simulation, simulated
from qoff.plan import Plan
from qoff.plan.explain import explain
from qoff.plan.native_sizes import NativeSizes
from qoff.plan.search import find_plan
from qoff.plan.workload import Lengths, Workload
from qoff.quant import QuantConfig

from .machines import GIB, MIB, SMALL, machine

WINDOW, LAYERS = 128, 12
WORK = Workload(Lengths.of(3000), Lengths.of(64), 24)
SHARES = Plan(share_prefixes=True)  # keeps all blocks


def windowed(on_gpu: bool) -> NativeSizes:
    """Five of six layers have a window."""
    kinds = ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(LAYERS)]
    config = {
        **SMALL,
        "model_type": "qwen3",
        "head_dim": 64,
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "layer_types": kinds,
    }
    return NativeSizes.of(config, QuantConfig(packing="split32" if on_gpu else "rows16"))


@pytest.mark.parametrize("on_gpu", [False, True])
def test_freed_blocks_leave_room_for_more_sequences(on_gpu: bool) -> None:
    of, on = windowed(on_gpu), machine(on_gpu, device=(240 if on_gpu else 80) * MIB)
    found, kept = (find_plan(of, on, WORK, template) for template in (None, SHARES))
    assert found.seconds < kept.seconds
    assert found.bound <= found.seconds * (1 + 1e-9)
    one = simulated(found, of, on, WORK)
    assert one.decode.seconds == pytest.approx(found.decode.seconds, rel=0.3)


def test_bytes_of_a_sequence_are_those_of_what_layers_see() -> None:
    shapes = windowed(False).shapes
    plan = Plan(batch_size=1, context=4096, prefill_tokens=64)
    forms = plan.kv.packed_forms(shapes)

    def records(plan: Plan) -> int:
        plans = plan.block_plans(shapes, forms).plans
        return sum(len(one.record_bytes) * sum(one.blocks.values()) for one in plans)

    blocks = (4096 - 64) // 64
    near = WINDOW // 64 - 1  # 64 tokens are not packed
    piece = min(near, 2)
    assert records(plan) == 2 * blocks + 10 * (near + piece)
    assert records(replace(plan, share_prefixes=True)) == 12 * blocks


@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_plan_says_what_layers_with_windows_keep(on_gpu: bool) -> None:
    of, on = windowed(on_gpu), machine(on_gpu, device=GIB)
    said = "10 of 12 layers see the newest 128 tokens and keep"
    notes = list(explain(of, on, WORK).warnings())
    assert f"{said} 1 of 47 KV blocks of a sequence" in notes
    assert f"{said} all" in list(explain(of, on, WORK, SHARES).warnings())


def test_a_simulated_plan_with_windows_and_long_prompts() -> None:
    """Whose tables grow in a pass, between others."""
    of, on = windowed(True), machine(True, device=240 * MIB)
    work = Workload(Lengths.of(3900), Lengths.of(100), 2)
    plan = find_plan(of, on, work).plan
    with Simulation(of, replace(plan, prefill_tokens=1024), on) as run:
        for past in (1000, 2000, 0):
            run.driver.read(1, 1, 1024, past)
        run.driver.begin(1, 3950, 4000)
        run.driver.decode()
