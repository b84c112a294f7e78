"""Saved plans come back as they were; the formulas of training are the published ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qoff.errors import ArgumentError, FormatError
from qoff.kvcache import KVPlacement, KVQuant
from qoff.plan import Plan
from qoff.plan.saved import plan_text, read_plan
from qoff.plan.training import Training

PLAN = Plan(
    device_memory="3GiB",
    batch_size=3,
    kv=KVQuant(8, 4, layers={1: (8, 8)}),
    kv_placement=KVPlacement(0.5, 0.25),
    activations="disk",
    adapt="rounds",
    spill_folder=Path("/somewhere"),
)


@pytest.mark.parametrize("plan", [Plan(), PLAN])
def test_a_plan_comes_back_from_its_file(tmp_path: Path, plan: Plan) -> None:
    path = tmp_path / "plan.json"
    path.write_text(plan_text(plan))
    assert read_plan(path) == plan
    assert read_plan(str(path)).device_memory == plan.device_memory


@pytest.mark.parametrize(
    "change",
    [
        {"qoff_plan": 2},
        {"speed": 1},
        {"batch_size": 0},
        {"adapt": "always"},
        {"device_memory": "much"},
        {"kv": 4},
        {"kv": {"k_bits": 5}},
        {"kv_placement": {"device_fraction": 2}},
        {"kv_placement": {"elsewhere": 1}},
    ],
    ids=str,
)
def test_a_damaged_plan_is_one_line(tmp_path: Path, change: dict[str, object]) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(json.loads(plan_text(PLAN)) | change))
    with pytest.raises(FormatError, match=r"plan\.json") as refusal:
        read_plan(path)
    assert "\n" not in str(refusal.value)


def test_gpt3_takes_what_was_published() -> None:
    """350 GB in 16 bits, 700 in 32, 2800 with Adam's states (ZeRO-Infinity, section 3)."""
    rows = Training(175 * 10**9, 96, 12288, 96, 1, 2048).rows()
    assert rows["inference: weights, 16 bits"] == 350 * 10**9
    assert rows["inference: weights, 32 bits"] == 700 * 10**9
    assert rows["training: weights, gradients and states"] == 2800 * 10**9


def test_a_checkpoint_of_activations_is_two_bytes_a_number() -> None:
    rows = Training(10**6, 10, 100, 4, 3, 7, checkpoint_every=5).rows()
    assert rows["training: activations, checkpoints"] == 2 * 3 * 7 * 100 * 2
    assert rows["training: activations"] == 10 * 3 * 7 * (16 * 100 + 2 * 4 * 7)


def test_efficiency_is_half_where_the_link_is_as_busy_as_the_gpu() -> None:
    parts = Training(10**6, 10, 100, 4, 1, 1000).efficiency(1e9, 1e12)
    assert parts["weights and gradients"] == pytest.approx(0.5)
    assert parts["Adam's states"] == pytest.approx(0.2)


def test_sizes_below_one_are_refused() -> None:
    with pytest.raises(ArgumentError, match="batch"):
        Training(1, 1, 1, 1, batch=0)
