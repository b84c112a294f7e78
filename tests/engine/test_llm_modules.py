"""`qoff.LLM` on models that run through transformers' modules: what `generate` says, in batches."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import qoff
from qoff.engine import LLM, SamplingParams
from qoff.errors import ArgumentError, BudgetError
from qoff.kvcache import KVPlacement, KVQuant
from qoff.memory import plan_residency
from qoff.memory.instrumentation import Instrumentation
from qoff.models import runtime
from qoff.plan import Plan
from tests.engine.test_allocations import Peak
from tests.instruments import POISON
from tests.module_models import MODULES, NEWEST, module_checkpoint
from tests.tiny_families import VOCAB
from tests.tiny_models import budgets, refused

KV = KVQuant(window=16)
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PLAN = Plan(batch_size=2, batches=2, context=120, prefill_tokens=100, kv=KV)
PLAIN = ["bloom", "minicpm3", "jamba", "vaultgemma", "falcon_h1", "mamba2"]
RECURRENT = ["jamba", "falcon_h1", "mamba2"]
WORKSPACES = ("workspace", "tiled_workspace")
OTHERS: dict[str, dict[str, Any]] = {
    "xmod": {"is_decoder": True, "languages": ["en_XX", "de_DE"], "default_language": "de_DE"},
    "zamba2": {  # whose layers share no weights, as its embeddings are not tied
        "layers_block_type": ["mamba", "hybrid", "hybrid"],
        "mamba_d_state": 8,
        "n_mamba_heads": 4,
        "chunk_size": 8,
        "adapter_rank": 8,
    },
}
PACKED = ["gpt2-head64", "vaultgemma-head64", "jamba-head64", "gemma3n-head64"]


def prompts() -> list[list[int]]:
    """Five for four places, two of them as long."""
    torch.manual_seed(0)
    return [torch.randint(4, VOCAB, (n,)).tolist() for n in (20, 1, 9, 9, 97)]


@cache
def alone(path: Path, kv: KVQuant | None) -> list[tuple[int, ...]]:
    """What `generate` answers to each prompt alone."""
    model, _ = qoff.load(path, device="cpu", kv=kv)
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    found = [model.generate(torch.tensor([p]), **options)[0, len(p) :] for p in prompts()]
    model.close()
    return [tuple(answer.tolist()) for answer in found]


def answers(path: Path, plan: Plan, hooks: Instrumentation = POISON) -> list[tuple[int, ...]]:
    with LLM(path, plan, device="cpu", _instrumentation=hooks) as llm:
        found = llm.generate(prompts(), PARAMS)
        assert all(llm.blocks.used(tier) == 0 for tier in ("device", "host", "disk"))
    assert not any(one.error for one in found)
    return [one.token_ids for one in found]


@pytest.mark.parametrize("name", [*PLAIN, *PACKED])
def test_the_answers_are_those_of_generate(base: Path, name: str) -> None:
    path = module_checkpoint(base, name)
    assert answers(path, PLAN) == alone(path, KV if name in PACKED else None)


@pytest.mark.parametrize("name", OTHERS)
def test_unusual_models_answer_as_generate_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(MODULES, name, {"model_type": name, **OTHERS[name]})
    path = module_checkpoint(tmp_path, name)
    assert answers(path, PLAN) == alone(path, None)


@pytest.mark.parametrize("name", ["lara_mini", "apertus1p5_text"])
def test_newer_models_answer_as_generate_does(base: Path, name: str) -> None:
    path = module_checkpoint(base, name)
    assert answers(path, PLAN) == alone(path, None)


def test_a_prompt_may_have_tokens_that_a_pruned_head_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are embedded, and never answered: penalties and scores know only what is."""
    pruned = {**NEWEST["apertus1p5_text"], "output_vocab_size": 100}
    monkeypatch.setitem(NEWEST, "apertus1p5_text", pruned)
    path = module_checkpoint(tmp_path, "apertus1p5_text")
    asked = [[5, VOCAB - 1, 7, 120, 9], [VOCAB - 1]]
    model, _ = qoff.load(path, device="cpu", kv=None)
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    wanted = [model.generate(torch.tensor([p]), **options)[0, len(p) :].tolist() for p in asked]
    model.close()
    penalized = replace(PARAMS, repetition_penalty=1.0001)
    with LLM(path, PLAN, device="cpu") as llm:
        for params in (PARAMS, penalized):
            found = llm.generate(asked, params)
            assert [list(one.token_ids) for one in found] == wanted
        scored, beyond = llm.generate(
            [[5, 99], asked[0]], replace(PARAMS, prompt_logprobs=0), use_tqdm=False
        )
        (none,) = llm.generate([[VOCAB]], PARAMS)
        (answer,) = llm.stream([[5]], PARAMS, [[100]])
    assert scored.prompt_logprobs is not None
    assert beyond.error == (
        f"the prompt, of which prompt_logprobs are wanted, has token {VOCAB - 1}; there are 0 to 99"
    )
    assert none.error == f"the prompt has token {VOCAB}; there are 0 to {VOCAB - 1}"
    assert answer.error == "the continuation has token 100; there are 0 to 99"


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("bloom", {"prefill_tokens": 7, "schedule": "sequential"}),
        ("vaultgemma", {"prefill_tokens": 40, "batches": 1, "batch_size": 5}),
        ("jamba-head64", {"kv_placement": KVPlacement(0, 0.5)}),
        ("gemma3n-head64", {"kv_placement": KVPlacement(0, 0.5)}),
        ("gpt2-head64", {"kv_placement": KVPlacement(0, 0), "batches": 3}),
    ],
)
def test_the_answers_do_not_depend_on_the_plan(
    base: Path, name: str, changes: dict[str, Any]
) -> None:
    path = module_checkpoint(base, name)
    assert answers(path, replace(PLAN, **changes)) == alone(path, KV if name in PACKED else None)


@pytest.mark.parametrize("name", ["minicpm3", "falcon_h1", "vaultgemma-head64"])
def test_weights_stream_within_the_budget(base: Path, name: str) -> None:
    path = module_checkpoint(base, name)
    with LLM(path, PLAN, device="cpu") as llm:
        rest = llm.memory.total("device")
    plan = replace(PLAN, device_memory=rest)
    least, everything = refused(lambda: LLM(path, plan, device="cpu"))
    assert rest < least < everything
    with pytest.raises(BudgetError, match=f"raise the budget to at least {least:,}, use fewer"):
        LLM(path, replace(PLAN, device_memory=rest - 1), device="cpu")
    plan = replace(PLAN, device_memory=least)
    with LLM(path, plan, device="cpu", _instrumentation=POISON) as llm:
        assert not llm.runtime.store.all_resident
        assert sum(llm.memory_by_tier()["device"].values()) <= least
        found = [one.token_ids for one in llm.generate(prompts(), PARAMS)]
    assert found == alone(path, KV if name in PACKED else None)


@pytest.mark.parametrize("name", ["gpt2-head64", "jamba-head64"])
def test_layers_larger_than_a_slot_come_in_tiles(
    base: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = module_checkpoint(base, name)
    least, _ = budgets(path)
    with LLM(path, PLAN, device="cpu") as llm:
        decoder: Any = llm.runtime.decoder
    monkeypatch.setattr(
        runtime,
        "plan_residency",
        lambda checkpoint, _, *args, **kw: plan_residency(
            checkpoint, least, *args, **kw | dict.fromkeys(WORKSPACES, decoder.outer_bytes)
        ),
    )
    with LLM(path, PLAN, device="cpu", _instrumentation=POISON) as llm:
        assert llm.runtime.residency.tiled
        found = [one.token_ids for one in llm.generate(prompts(), PARAMS)]
    assert found == alone(path, KV if name in PACKED else None)


@pytest.mark.parametrize("name", ["bloom", "jamba", "gpt2-head64", "vaultgemma"])
def test_no_more_is_allocated_than_is_counted(base: Path, name: str) -> None:
    path = module_checkpoint(base, name)
    with Peak() as peak, LLM(path, PLAN, device="cpu") as llm:
        llm.generate(prompts(), PARAMS)
        counted = sum(llm.memory.purposes["device"].values())
    assert peak.most <= counted <= 5 * peak.most


@pytest.mark.parametrize("name", ["bloom", "jamba-head64"])
def test_answers_of_one_prompt_go_on_from_the_same_states(base: Path, name: str) -> None:
    path = module_checkpoint(base, name)
    prompt = prompts()[4]
    with LLM(path, PLAN, device="cpu", _instrumentation=POISON) as llm:
        found = llm.generate([prompt], replace(PARAMS, n=2))
    assert [one.token_ids for one in found] == 2 * [alone(path, KV if name in PACKED else None)[4]]


@pytest.mark.parametrize("name", [*RECURRENT, "axk2"])
def test_a_prompt_that_takes_two_passes_fails_alone(base: Path, name: str) -> None:
    path = module_checkpoint(base, name)
    with LLM(path, replace(PLAN, prefill_tokens=96), device="cpu") as llm:
        found = llm.generate(prompts(), PARAMS)
        (other,) = llm.generate(prompts()[:1], replace(PARAMS, prompt_logprobs=0))
    assert [one.finish_reason for one in found] == ["length"] * 4 + ["error"]
    assert "prefill_tokens=97 or more" in found[4].error
    assert "prompt_logprobs: this model reads a prompt in one pass" in other.error


@pytest.mark.parametrize(
    ("name", "changes", "error", "message"),
    [
        ("bloom", {"activations": "host"}, ArgumentError, "activations='device', not 'host'"),
        ("bloom", {"share_prefixes": True}, ArgumentError, "leave share_prefixes out"),
        ("axk2", {"share_prefixes": True}, ArgumentError, "leave share_prefixes out"),
        ("axk2", {"device_memory": 1 << 18}, BudgetError, "beside the weights .*states"),
        ("jamba-head64", {"share_prefixes": True}, ArgumentError, "leave share_prefixes out"),
        ("bloom", {"device_memory": 1 << 18}, BudgetError, "beside the weights .*states"),
        ("gpt2-head64", {"device_memory": 1 << 18}, BudgetError, "beside the weights .*recent KV"),
    ],
)
def test_what_a_plan_cannot_have_is_refused(
    base: Path, name: str, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        LLM(module_checkpoint(base, name), replace(PLAN, **changes), device="cpu")


def test_prefixes_are_shared_where_all_is_packed(base: Path) -> None:
    path = module_checkpoint(base, "gpt2-head64")
    prompt = prompts()[4]
    plan = replace(PLAN, share_prefixes=True)
    with LLM(path, plan, device="cpu", _instrumentation=POISON) as llm:
        found = llm.generate([prompt, prompt], PARAMS)
        assert sum(round.read for round in llm.rounds) < 2 * len(prompt)
    assert found[0].token_ids == alone(path, KV)[4]
