"""Drafts of a small model on the ops of a GPU: fewer passes, the same tokens, memory as planned.

Without a GPU everything is in CPU tensors, and Triton interprets the kernels.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qoff.engine import LLM, SamplingParams
from qoff.errors import BudgetError
from qoff.kvcache import KVPlacement, KVQuant
from qoff.models.convert.convert import convert
from qoff.plan import Plan
from tests.engine.test_llm_device import few_programs, where
from tests.known_drafts import cheap_passes, counts
from tests.models.test_triton_decoder import CHANGES
from tests.mtp_models import tiny_with_mtp
from tests.tiny_models import QUANT, save_model, save_tokenizer

__all__ = ["cheap_passes", "few_programs", "where"]  # fixtures, the last with pytest.mark.gpu
pytestmark = pytest.mark.usefixtures("cheap_passes")
PROMPTS = [[5 + i % 23 for i in range(length)] for length in (70, 9)]
PARAMS = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
PLAN = Plan(batch_size=2, context=96, prefill_tokens=80, kv=KVQuant(window=0))
SIZES = {**CHANGES, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 128}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drafts")
    save_model(folder / "model", **SIZES)
    save_tokenizer(folder / "model")
    convert(folder / "model", folder / "checkpoint", quant=QUANT)
    return folder / "checkpoint"


@pytest.mark.parametrize("placement", [KVPlacement(), KVPlacement(0.0, 1.0)], ids=["near", "host"])
def test_a_small_model_drafts_and_changes_no_token(
    placement: KVPlacement,
    checkpoint: Path,
    where: dict[str, Any],
) -> None:
    plan = replace(PLAN, kv_placement=placement)
    with LLM(checkpoint, plan, **where) as llm:
        wanted = [one.token_ids for one in llm.generate(PROMPTS, PARAMS)]
        rounds, alone = len(llm.rounds), llm.memory.total("device")
    plan = replace(plan, draft_model=str(checkpoint), draft_tokens=3)
    with LLM(checkpoint, plan, **where) as llm:
        assert [one.token_ids for one in llm.generate(PROMPTS, PARAMS)] == wanted
        assert sum(one.accepted for one in llm.rounds) > 0
        assert len(llm.rounds) < rounds  # it drafts for itself
        drafts = llm._rounds.current.opened.drafts
        assert drafts is not None
        caches = drafts.executor.arenas["device"].capacity
        counted = llm.memory_by_tier()["device"]["draft model"]
        assert counted > drafts.executor.runtime.residency.device_weight_bytes + caches
        assert llm.memory.total("device") > alone + counted
        assert drafts.bytes_for(llm.plan) == counted


def test_a_layer_for_multi_token_prediction_drafts(
    tmp_path_factory: pytest.TempPathFactory, where: dict[str, Any]
) -> None:
    """The model's hidden states are left where its recorded steps find them, too."""
    path = tiny_with_mtp(tmp_path_factory.getbasetemp(), "glm4-moe", "split32", sure=True)
    with LLM(path, PLAN, **where) as llm:
        wanted = [one.token_ids for one in llm.generate(PROMPTS, PARAMS)]
    plan = replace(PLAN, draft_model="mtp", draft_tokens=2)
    with LLM(path, plan, **where) as llm:
        assert [one.token_ids for one in llm.generate(PROMPTS, PARAMS)] == wanted
        drafted, accepted = counts(llm)
        assert accepted == drafted > 6
        drafts = llm._rounds.current.opened.drafts
        assert drafts is not None
        assert drafts.bytes_for(llm.plan) == llm.memory_by_tier()["device"]["draft model"]


def test_one_that_does_not_fit_is_refused(
    checkpoint: Path,
    where: dict[str, Any],
) -> None:
    plan = replace(PLAN, draft_model=str(checkpoint), draft_tokens=3)
    with LLM(checkpoint, PLAN, **where) as llm:
        bound = llm.memory.total("device") + llm.runtime.residency.device_bytes // 2
    with pytest.raises(BudgetError, match=r"draft_model .*checkpoint: "):
        LLM(checkpoint, replace(plan, device_memory=bound), **where)
