"""Experts of models of transformers' modules come one by one where memory is short."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qoff.engine import LLM
from qoff.models.convert.convert import convert
from tests.engine.test_llm_modules import PARAMS, PLAN, alone, prompts
from tests.instruments import POISON
from tests.module_models import NEWEST, OWN_CACHES, save_module_model
from tests.tiny_models import QUANT, refused

LARGE = {"moe_intermediate_size": 512, "num_experts_per_tok": 2}
COUNT = 64


@pytest.fixture(scope="module", params=["deepseek_v4", "axk2", "lara_mini"])
def mixture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Whose experts take most of it; the last one's sequences share a padded batch."""
    name: str = request.param
    known = NEWEST if name in NEWEST else OWN_CACHES
    count = "n_routed_experts" if "n_routed_experts" in known[name] else "num_experts"
    folder = tmp_path_factory.mktemp(name)
    with pytest.MonkeyPatch.context() as patched:
        sizes = {**known[name], **LARGE, count: COUNT}
        if name == "deepseek_v4":  # whose config has one name for both
            sizes["intermediate_size"] = LARGE["moe_intermediate_size"]
        patched.setitem(known, name, sizes)
        save_module_model(folder / "model", name)
    return convert(folder / "model", folder / "checkpoint", quant=QUANT, for_cpu=True)


def answers(llm: LLM) -> list[tuple[int, ...]]:
    return [one.token_ids for one in llm.generate(prompts(), PARAMS, use_tqdm=False)]


def test_no_token_changes_whatever_there_is_room_for(mixture: Path) -> None:
    wanted, small = alone(mixture, None), replace(PLAN, batch_size=1, batches=2, adapt=False)
    with LLM(mixture, small, device="cpu") as llm:
        rest = llm.memory.total("device")
        assert not llm.runtime.residency.expert_slots
        assert answers(llm) == wanted
    least, everything = refused(
        lambda: LLM(mixture, replace(small, device_memory=rest), device="cpu")
    )
    assert least < everything - 1
    for budget in (least, (least + everything) // 2, everything - 1):
        plan = replace(small, device_memory=budget)
        with LLM(mixture, plan, device="cpu", _instrumentation=POISON) as llm:
            residency, layers = llm.runtime.residency, len(llm.runtime.checkpoint.layers)
            assert 0 < residency.expert_slots < COUNT * layers
            assert sum(llm.memory_by_tier()["device"].values()) <= budget
            assert answers(llm) == wanted
            experts: Any = llm.runtime.store.experts
            assert experts.stats.misses > 0


def test_a_sequence_moves_what_its_tokens_choose(mixture: Path) -> None:
    plan = replace(PLAN, batches=1, batch_size=1, adapt=False)
    with LLM(mixture, plan, device="cpu") as llm:
        rest = llm.memory.total("device")
    least, _ = refused(lambda: LLM(mixture, replace(plan, device_memory=rest), device="cpu"))
    with LLM(mixture, replace(plan, device_memory=least), device="cpu") as llm:
        llm.generate([[5]], replace(PARAMS, max_tokens=1), use_tqdm=False)
        experts: Any = llm.runtime.store.experts
        layers = sum(count > 0 for count in experts.counts)
        assert layers <= experts.wanted <= 2 * layers
