"""What `qoff.LLM` refuses before anything is computed, and prompts that fail alone."""

from __future__ import annotations

import copy
import pickle
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from qoff.engine import LLM, SamplingParams
from qoff.errors import ArgumentError, BudgetError, QoffError
from qoff.kvcache.store.placement import KVPlacement
from qoff.models.convert.convert import convert
from qoff.plan import Plan
from tests.engine.test_llm import CONTEXT, PROMPTS, QUANT
from tests.tiny_models import QUANT as TINY_QUANT
from tests.tiny_models import save_model


def test_one_bad_prompt_fails_alone(checkpoint: Path) -> None:
    prompts = [PROMPTS[0], [], [5] * 300, [500], "abc", [-1], 7, [5, "x"], {"text": "x"}, True]
    with LLM(checkpoint, Plan(batch_size=4, context=CONTEXT, kv=QUANT)) as llm:
        params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
        found = llm.generate(prompts, params)  # type: ignore[arg-type]
        each = [replace(params, n=5), replace(params, stop_token_ids=[5, 128]), params]
        others = llm.generate([[5]] * 3, each)
        with pytest.raises(ArgumentError, match="parameters are SamplingParams, not dict"):
            llm.generate([[5]], [{"n": 1}])  # type: ignore[list-item]
        with pytest.raises(ArgumentError, match="2 prompts, but parameters for 3"):
            llm.generate([[5]] * 2, each)
        for copied in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(QoffError, match="pickled or copied; give other processes"):
                copied(llm)
    assert pickle.loads(pickle.dumps(found)) == copy.deepcopy(found) == found
    assert [r.index for r in found] == list(range(10))
    errors = {r.index: r.error for r in found if r.finish_reason == "error"}
    forms = "text, token ids, {'prompt': text} or {'prompt_token_ids': ids}"
    assert errors == {
        1: "the prompt has no tokens",
        2: "a prompt of 300 tokens leaves no room for an answer in the plan's context of 300",
        3: "the prompt has token 500; there are 0 to 127",
        5: "the prompt has token -1; there are 0 to 127",
        6: f"a prompt is {forms}, not int",
        7: "a prompt's token ids are whole numbers, not str",
        8: f"a prompt is {forms}, not a dict with the keys 'text'",
        9: f"a prompt is {forms}, not bool",
    }
    assert [r.error for r in others] == [
        "5 answers of a prompt are more than a batch of 4; use a plan with a larger batch_size",
        "the list of stop_token_ids has token 128; there are 0 to 127",
        "",
    ]


@pytest.mark.parametrize("tier", ["device", "host"])
def test_too_much_is_refused_before_anything_is_loaded(checkpoint: Path, tier: str) -> None:
    plan = Plan(
        batch_size=64,
        batches=8,
        context=CONTEXT,
        kv=QUANT,
        kv_placement=KVPlacement(0.5, 0.5),
        activations="host",
        **{f"{tier}_memory": 1 << 20},  # type: ignore[arg-type]
    )
    with pytest.raises(BudgetError, match=rf"{tier} memory: [\d,]+ bytes are needed .*KV blocks"):
        LLM(checkpoint, plan)


def test_a_budget_that_is_too_small_is_refused_with_the_least_that_is_not(checkpoint: Path) -> None:
    """Layers in tiles would want more working space than those that stream whole."""
    plan = Plan(batch_size=2, context=CONTEXT, prefill_tokens=600, kv=QUANT)
    with LLM(checkpoint, plan) as llm:
        beside = llm.memory.total("device")

    def refused(budget: int) -> str:
        with pytest.raises(BudgetError) as refusal:
            LLM(checkpoint, replace(plan, device_memory=budget))
        return str(refusal.value)

    message = refused(beside + 4096)
    assert f"and the budget is {beside + 4096:,}" in message
    found = re.search(r"takes at least ([\d,]+) ", message)
    assert found is not None
    least = int(found[1].replace(",", ""))
    refused(least - 1)
    assert f"raise the budget to at least {least:,}, use fewer or shorter" in refused(beside - 1)
    with LLM(checkpoint, replace(plan, device_memory=least)) as llm:
        assert llm.runtime.residency.slots
        assert llm.memory.total("device") == beside


def test_a_prompt_beyond_the_positions_of_a_model_fails_alone(
    tmp_path: Path,
) -> None:
    save_model(tmp_path / "model", "opt", hidden_size=128, num_attention_heads=2)
    convert(tmp_path / "model", tmp_path / "out", quant=TINY_QUANT)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with LLM(tmp_path / "out", Plan(batch_size=2, kv=QUANT)) as llm:
        results = llm.generate([[5, 6, 7], [9] * 256, [9] * 253], params)
    assert [r.finish_reason for r in results] == ["length", "error", "length"]
    assert "up to 256 tokens" in results[1].error
    assert len(results[2].token_ids) == 3


def test_a_trace_that_cannot_be_written_is_refused_first(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="no trace can be written"):
        LLM(checkpoint, trace=tmp_path / "nowhere/trace.json")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0; use a whole number from 1"),
        ({"kv": 4}, "kv is 4; use qoff.KVQuant"),
        ({"kv_placement": (1, 0)}, "use qoff.KVPlacement"),
        ({"batch_size": 1.5}, "batch_size is 1.5"),
        ({"context": True}, "context is True"),
        ({"device_memory": "2 sacks"}, "device_memory: '2 sacks' is not a size"),
        ({"schedule": "diagonal"}, "schedule is 'diagonal'; use one of block, sequential"),
        ({"activations": "cloud"}, "activations is 'cloud'"),
    ],
)
def test_plans_out_of_range_are_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Plan(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": 0},
        {"max_tokens": 2.5},
        {"min_tokens": 17},
        {"temperature": -1},
        {"temperature": 1e-40},
        {"temperature": "1"},
        {"top_k": -2},
        {"top_k": True},
        {"top_p": 0},
        {"min_p": 1},
        {"n": 0},
        {"seed": 1.5},
        {"stop": ""},
        {"stop": ["a", 1]},
        {"stop_token_ids": 5},
        {"ignore_eos": 1},
        {"logprobs": -1},
        {"repetition_penalty": 0},
        {"presence_penalty": float("nan")},
        {"frequency_penalty": 2.5},
    ],
)
def test_parameters_out_of_range_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ArgumentError, match=f"{next(iter(wrong))} is"):
        SamplingParams(**wrong)  # type: ignore[arg-type]


def test_texts_that_end_answers_need_a_tokenizer(checkpoint: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(checkpoint, bare, ignore=shutil.ignore_patterns("tokenizer*"))
    with LLM(bare, Plan(context=CONTEXT)) as llm:
        (found,) = llm.generate([PROMPTS[0]], SamplingParams(temperature=0, max_tokens=2, stop="x"))
        assert found.finish_reason == "error"
        assert "no tokenizer" in str(found.error)
        (found,) = llm.generate([PROMPTS[0]], SamplingParams(temperature=0, max_tokens=2))
        assert found.finish_reason == "length"
