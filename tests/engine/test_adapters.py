"""Adapters in `qoff.LLM`: mixed in a batch, counted, and without a trace in other answers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from qoff.engine import LLM, SamplingParams
from qoff.errors import ArgumentError, BudgetError
from qoff.kvcache import KVQuant
from qoff.models.native.decoder import Decoder
from qoff.plan import Plan
from tests.adapters import save_adapter
from tests.module_models import module_checkpoint
from tests.tiny_models import budgets

PLAN = Plan(batch_size=3, context=160, kv=KVQuant(window=128))
PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROMPTS = [[5, 6, 7, 8, 9], [11, 12, 13], [20, 21, 22, 23]]
EACH = ["a", None, "b"]


@pytest.fixture(scope="module")
def models(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """PEFT's models by the folders of their adapters."""
    base = tmp_path_factory.mktemp("adapters")
    wanted = {"a": {"lora_alpha": 16}, "b": {"r": 3, "target_modules": ["q_proj", "down_proj"]}}
    return {
        str(base / name): save_adapter(checkpoint, base / name, i, **how)
        for i, (name, how) in enumerate(wanted.items())
    }


@pytest.fixture(scope="module")
def adapters(models: dict[str, Any]) -> dict[str, str]:
    return dict(zip("ab", models, strict=True))


@pytest.fixture(scope="module")
def expected(checkpoint: Path, adapters: dict[str, str]) -> list[tuple[int, ...]]:
    """What each prompt is answered alone."""
    with LLM(checkpoint, PLAN, device="cpu", adapters=adapters) as llm:
        return [
            llm.generate([prompt], PARAMS, adapter=name)[0].token_ids
            for prompt, name in zip(PROMPTS, EACH, strict=True)
        ]


def test_the_likeliest_tokens_are_pefts(
    expected: list[tuple[int, ...]], models: dict[str, Any]
) -> None:
    for model, i in zip(models.values(), (0, 2), strict=True):
        ids = torch.tensor([[*PROMPTS[i], *expected[i]]])
        with torch.no_grad():
            logits = model(ids).logits[0, len(PROMPTS[i]) - 1 : -1]
        best = logits.max(1).values
        mine = logits.gather(1, torch.tensor(expected[i])[:, None])[:, 0]
        assert (best - mine).max() < 0.05 * best.abs().mean()


def test_without_adapters_answers_are_the_same_bits(
    checkpoint: Path, adapters: dict[str, str], expected: list[tuple[int, ...]]
) -> None:
    params = replace(PARAMS, logprobs=0)
    with LLM(checkpoint, PLAN, device="cpu") as llm:
        plain = llm.generate([PROMPTS[1]] * 3, params)
    with LLM(checkpoint, PLAN, device="cpu", adapters=adapters) as llm:
        mixed = llm.generate([PROMPTS[1]] * 3, params, adapter=EACH)
    assert mixed[1].token_ids == plain[1].token_ids == expected[1]
    assert mixed[1].logprobs == plain[1].logprobs
    assert len({one.token_ids for one in mixed}) == 3


@pytest.mark.parametrize(
    ("changes", "weights"),
    [
        ({}, 1.0),
        ({"batch_size": 2, "batches": 2, "activations": "host"}, 0.6),
        ({"draft_tokens": 3, "schedule": "sequential"}, 0.3),  # in tiles
        ({"share_prefixes": True, "kv": KVQuant(window=0)}, 1.0),
    ],
    ids=["resident", "streamed", "tiles", "shared"],
)
def test_mixed_in_a_batch_each_answer_is_the_one_alone(
    checkpoint: Path,
    adapters: dict[str, str],
    expected: list[tuple[int, ...]],
    changes: dict[str, Any],
    weights: float,
) -> None:
    plan = replace(PLAN, **changes)
    with LLM(checkpoint, plan, device="cpu", adapters=adapters) as llm:
        assert llm._executor.adapters is not None
        layers = llm._executor.adapters.layers
        memory = llm.memory.total("device") - layers.nbytes(layers.places, through_slot=False)[0]
        if weights == 1:
            found = llm.generate(PROMPTS * 2, PARAMS, adapter=EACH * 2)
            decoder = llm.runtime.decoder
            assert isinstance(decoder, Decoder)
            assert decoder.replays is not None
            assert decoder.replays.replayed > 0
    if weights < 1:
        least, everything = budgets(checkpoint)
        bound = memory + int(least + weights * (everything - least))
        host = llm.memory.total("host") + layers.nbytes(frozenset(), through_slot=False)[1]
        plan = replace(plan, device_memory=bound, host_memory=host)
        with LLM(checkpoint, plan, device="cpu", adapters=adapters) as llm:
            assert llm.runtime.residency.slots
            on_host = llm.memory_by_tier()["host"]["adapters"]
            assert on_host > 0  # beside what streams
            found = llm.generate(PROMPTS * 2, PARAMS, adapter=EACH * 2)
        rest = llm.memory.total("host") - on_host
        for left in (rest, None):  # has no room; is no other memory
            plan = replace(plan, device_memory=bound + on_host, host_memory=left)
            with LLM(checkpoint, plan, device="cpu", adapters=adapters) as llm:
                assert llm.runtime.residency.slots
                memory = llm.memory_by_tier()
                assert "adapters" not in memory["host"]
                assert memory["device"]["adapters"] >= on_host
                assert sum(memory["device"].values()) <= bound + on_host
    if not changes.get("share_prefixes"):
        assert [one.token_ids for one in found] == expected * 2


def test_prompts_that_begin_alike_share_blocks_of_their_adapter_alone(
    checkpoint: Path, adapters: dict[str, str]
) -> None:
    plan = replace(PLAN, share_prefixes=True, kv=KVQuant(8, 8, window=0))
    prompt, params = [5 + i % 40 for i in range(130)], replace(PARAMS, max_tokens=8)
    with LLM(checkpoint, plan, device="cpu", adapters=adapters) as llm:
        wanted = [llm.generate([prompt], params, adapter=name)[0].token_ids for name in EACH]
        assert sum(one.read for one in llm.rounds) == 3 * len(prompt)
        found = llm.generate([prompt] * 3, params, adapter=EACH)
        assert sum(one.read for one in llm.rounds) == 3 * len(prompt) + 3 * 2
    assert [one.token_ids for one in found] == wanted


def test_adapters_are_counted_and_refused_where_they_do_not_fit(
    checkpoint: Path, adapters: dict[str, str]
) -> None:
    with LLM(checkpoint, PLAN, device="cpu") as llm:
        without = llm.memory.total("device")
    with LLM(checkpoint, PLAN, device="cpu", adapters=adapters) as llm:
        assert llm._executor.adapters is not None
        counted = llm.memory_by_tier()["device"]["adapters"]
        layers = llm._executor.adapters.layers
        assert counted > layers.nbytes(layers.places, through_slot=False)[0] > 0
        assert llm.memory.total("device") == without + counted
    plan = replace(PLAN, device_memory=without)
    with pytest.raises(BudgetError, match=r"beside the weights \(.*, adapters ") as refusal:
        LLM(checkpoint, plan, device="cpu", adapters=adapters)
    assert "\n" not in str(refusal.value)


def test_what_cannot_be_asked_for_is_refused(
    checkpoint: Path, adapters: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    with LLM(checkpoint, PLAN, device="cpu", adapters=adapters) as llm:
        with pytest.raises(ArgumentError, match="no adapter 'c'; there are: 'a', 'b'"):
            llm.generate(PROMPTS, PARAMS, adapter="c")
        with pytest.raises(ArgumentError, match="3 prompts, but adapters for 1"):
            llm.generate(PROMPTS, PARAMS, adapter=["a"])
    other = module_checkpoint(tmp_path_factory.getbasetemp(), "bloom")
    with pytest.raises(ArgumentError, match="adapters: needs an architecture"):
        LLM(other, replace(PLAN, kv=KVQuant(window=16)), device="cpu", adapters=adapters)
