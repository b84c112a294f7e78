"""Adapters on the ops of a GPU: the same answers wherever their matrices are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from qoff.engine import LLM
from qoff.kvcache.store.placement import DEVICE, HOST
from tests.adapters import save_adapter
from tests.engine.test_llm_device import (
    ON_GPU,
    PARAMS,
    PLAN,
    PROMPTS,
    checkpoint,
    few_programs,
    where,
)
from tests.models.test_triton_decoder import least_budget

__all__ = ["checkpoint", "few_programs", "where"]  # fixtures, the last with pytest.mark.gpu

EACH = ["a", None, "b"]
SEEDS = {"a": 21, "b": 12}  # with which no token is chosen by less than `CLEAR`
CLEAR = 0.15  # of logits: by less than that float16 on a GPU might choose another
SAID = replace(PARAMS, logprobs=2)


def test_adapters_come_with_their_layers(
    checkpoint: Path, where: dict[str, Any], tmp_path: Path
) -> None:
    """Through one slot, so that the device has less of them; the tokens are those of a CPU."""
    for name, seed in SEEDS.items():
        save_adapter(checkpoint, tmp_path / name, seed)
    adapters = {name: tmp_path / name for name in SEEDS}
    with LLM(checkpoint, PLAN, adapters=adapters, device="cpu") as llm:
        answers = llm.generate(PROMPTS, SAID, adapter=EACH)
    expected = [one.token_ids for one in answers]
    for step in (step for one in answers for step in one.logprobs or ()):
        first, second = sorted(choice.logprob for choice in step.values())[:-3:-1]
        assert first - second > CLEAR
    with LLM(checkpoint, PLAN, adapters=adapters, **where) as llm:
        near = [one.token_ids for one in llm.generate(PROMPTS, PARAMS, adapter=EACH)]
        plain = [one.token_ids for one in llm.generate(PROMPTS, PARAMS)]
        assert "adapters" not in llm.memory_by_tier()[HOST]
        executor = llm._executor
        assert executor.adapters is not None
        whole, _ = executor._adapter_bytes(PLAN, False, executor.adapters.layers.places)
        none, _ = executor._adapter_bytes(PLAN, True, ())
        least = llm.memory.total(DEVICE) - whole + none
        least += least_budget(checkpoint, 2 if ON_GPU else 0)
    assert near == expected
    assert [a == b for a, b in zip(near, plain, strict=True)] == [False, True, False]
    for schedule in ("block", "sequential"):
        plan = replace(PLAN, device_memory=least, schedule=schedule)
        with LLM(checkpoint, plan, adapters=adapters, **where) as llm:
            assert llm.runtime.residency.slots
            taken = llm.memory_by_tier()
            assert taken[HOST]["adapters"] > 0
            found = llm.generate(PROMPTS, PARAMS, adapter=EACH)
            assert [one.token_ids for one in found] == near
