"""Gemma 3n in batches: streams of hidden states, wherever they wait for their turn."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from qoff.engine import LLM
from qoff.kvcache.store.placement import KVPlacement
from qoff.memory import plan_residency
from qoff.models import runtime
from qoff.models.convert.convert import convert
from qoff.plan import Plan
from qoff.plan.native_sizes import NativeSizes
from tests.engine.test_llm_gemma4 import PARAMS, PLAN, PROMPTS, answers
from tests.tiny_models import QUANT, budgets, save_model, save_tokenizer


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gemma3n")
    save_model(path / "model", "gemma3n", head_dim=64, sliding_window=90)
    save_tokenizer(path / "model")
    return convert(path / "model", path / "converted", quant=QUANT)


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[tuple[int, ...]]:
    return answers(checkpoint, PLAN)


@pytest.mark.parametrize("where", ["device", "host", "disk"])
def test_the_answers_do_not_depend_on_the_plan(
    checkpoint: Path, expected: list[tuple[int, ...]], where: str
) -> None:
    moved = KVPlacement(0.3, 0.4)
    batches = replace(PLAN, batch_size=2, batches=2, kv_placement=moved, activations=where)
    assert answers(checkpoint, batches) == expected


@pytest.mark.parametrize("where", ["device", "host", "disk"])
def test_layers_larger_than_a_slot_come_in_tiles(
    checkpoint: Path,
    expected: list[tuple[int, ...]],
    where: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    least, _ = budgets(checkpoint)
    monkeypatch.setattr(
        runtime,
        "plan_residency",
        lambda path, _, *args, **kw: plan_residency(path, least, *args, **kw),
    )
    assert answers(checkpoint, replace(PLAN, batches=2, activations=where)) == expected


def test_weights_stream_within_a_budget(checkpoint: Path, expected: list[tuple[int, ...]]) -> None:
    plan = replace(PLAN, batch_size=2, batches=2, activations="host")
    with LLM(checkpoint, plan) as llm:
        rest = llm.memory.total("device")
    least, everything = budgets(checkpoint)
    for weights in ((least + everything) // 2, everything - 1):
        limited = replace(plan, device_memory=rest + weights)
        with LLM(checkpoint, limited) as llm:
            assert not llm.runtime.store.all_resident
            assert sum(llm.memory_by_tier()["device"].values()) <= rest + weights
            assert [one.token_ids for one in llm.generate(PROMPTS, PARAMS)] == expected


def test_plans_count_all_streams() -> None:
    """Gemma 3n E4B, by the numbers of its config.json."""
    sizes = NativeSizes.of({"model_type": "gemma3n_text"})
    spec = sizes.spec
    assert len(sizes.shapes) == 20
    assert spec.hidden_width == 4 * 2048
    assert [spec.deviations(i) is not None for i in range(35)] == [True] * 10 + [False] * 25
    plan = Plan(batch_size=3, batches=2, prefill_tokens=10, activations="device")
    held = plan.hidden_bytes(spec.hidden_width, torch.float32)["device"]
    assert held == 4 * 2 * (3 + 10) * 4 * 2048
