"""What `LLM` takes as prompts, memory bounds and defaults."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qoff.engine import LLM, SamplingParams
from qoff.engine.prompts import PromptReader
from qoff.errors import ArgumentError, BudgetError
from qoff.kvcache import KVPlacement
from qoff.plan import Plan
from tests.tiny_models import tiny_checkpoint

PARAMS = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
PLAN = Plan(batch_size=4, context=96)
CHAT = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.getbasetemp(), "llama-head64")


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    with LLM(checkpoint, PLAN) as llm:
        yield llm


def test_all_forms_of_a_prompt_have_the_same_answer(llm: LLM) -> None:
    (ids,) = [llm.tokenizer("Hello")["input_ids"]]  # type: ignore[misc]
    forms: list[Any] = ["Hello", ids, {"prompt": "Hello"}, {"prompt_token_ids": ids}]
    (wanted,) = llm.generate("Hello", PARAMS)  # one string is one prompt
    assert (wanted.prompt, wanted.prompt_token_ids) == ("Hello", tuple(ids))
    found = [*llm.generate(forms, PARAMS), *(llm.generate(form, PARAMS)[0] for form in forms)]
    assert {one.token_ids for one in found} == {wanted.token_ids}
    assert [one.index for one in found] == [0, 1, 2, 3, 0, 0, 0, 0]
    assert llm.generate([], PARAMS) == []
    with pytest.raises(ArgumentError, match="prompts are of type NoneType"):
        llm.generate(None, PARAMS)  # type: ignore[arg-type]


def test_answers_are_in_the_order_of_the_prompts(llm: LLM) -> None:
    each = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (9, 2, 5)]
    assert [one.index for one in llm.stream(["a", "b", "c"], each)] == [1, 2, 0]
    assert [len(one.token_ids) for one in llm.generate(["a", "b", "c"], each)] == [9, 2, 5]


def test_conversations_go_through_the_chat_template(llm: LLM, checkpoint: Path) -> None:
    text = "<s>user: Hi</s><s>assistant: "
    (alone,) = llm.chat(CHAT, PARAMS)
    (plain,) = llm.generate(text, PARAMS)
    assert alone == plain
    system = {"role": "system", "content": "Be brief"}
    both = llm.chat([CHAT, [system, *CHAT]], PARAMS, add_generation_prompt=False)
    assert [one.prompt for one in both] == [
        "<s>user: Hi</s>",
        "<s>system: Be brief</s><s>user: Hi</s>",
    ]
    (refused,) = llm.chat(CHAT, PARAMS, chat_template="{{ raise_exception('no') }}")
    assert "the chat template does not take this: no" in refused.error
    with pytest.raises(ArgumentError, match="such lists, not str"):
        llm.chat("Hi", PARAMS)  # type: ignore[arg-type]


def test_the_context_clips_an_answer(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    more = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    found = llm.generate([[5] * 90, [5] * 90, [5] * 96, [5]], [params, more, more, PARAMS])
    assert [(len(one.token_ids), one.finish_reason) for one in found] == [
        (6, "length"),
        (6, "length"),
        (0, "error"),
        (3, "length"),
    ]


def test_the_checkpoint_says_how_to_sample_unless_the_caller_does(
    checkpoint: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint, copy)
    said = {"do_sample": True, "temperature": 0.5, "top_p": 0.9, "max_new_tokens": 7, "top_k": None}
    (copy / "generation_config.json").write_text(json.dumps(said))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))
    with LLM(copy, PLAN) as llm:
        params = llm.get_default_sampling_params()
        assert params == SamplingParams(temperature=0.5, top_p=0.9, max_tokens=7)
        assert len(llm.generate("a")[0].token_ids) == 7


def test_bounds_are_the_plans_or_the_callers(checkpoint: Path) -> None:
    with LLM(checkpoint, PLAN, max_memory={"cpu": "64MiB"}, host_memory=64 << 20) as llm:
        assert (llm.plan.device_memory, llm.plan.host_memory) == (64 << 20, 64 << 20)
    bounded = Plan(batch_size=4, context=96, device_memory="64MiB")
    with LLM(checkpoint, bounded, device_memory=64 << 20) as llm:
        assert llm.plan == bounded
    with pytest.raises(ArgumentError, match="but 67108864 in the plan"):
        LLM(checkpoint, bounded, device_memory="32MiB")


def test_a_bound_of_host_memory_alone_is_for_what_the_plan_has_there(checkpoint: Path) -> None:
    for plan in (None, PLAN, replace(PLAN, host_memory="1MiB")):
        with pytest.raises(ArgumentError, match="holds what device_memory has no room for"):
            LLM(checkpoint, plan, device="cpu", host_memory="1MiB")
    offloaded = replace(PLAN, context=1024, kv_placement=KVPlacement(0, 1))
    with LLM(checkpoint, offloaded, device="cpu", host_memory="8MiB") as llm:
        assert 0 < llm.memory.total("host") <= 8 << 20
    with pytest.raises(BudgetError, match="host memory"):
        LLM(checkpoint, offloaded, device="cpu", host_memory=1)


@pytest.mark.parametrize(
    "wrong",
    [
        {"path": 3},
        {"path": None},
        {"plan": 3},
        {"plan": {"batches": 2}},
        {"adapters": ["a"]},
        {"adapters": {"a": 3}},
    ],
)
def test_paths_plans_and_adapters_of_other_types_are_refused(
    checkpoint: Path, wrong: dict[str, Any]
) -> None:
    with pytest.raises(ArgumentError, match=f"{next(iter(wrong))} (is|are) .*; give a"):
        LLM(**{"path": checkpoint, **wrong})


def test_a_folder_to_spill_to_may_be_text(checkpoint: Path, tmp_path: Path) -> None:
    folder: Any = str(tmp_path)
    plan = Plan(batch_size=2, context=96, kv_placement=KVPlacement(0, 0), spill_folder=folder)
    with LLM(checkpoint, plan) as llm:
        assert llm.generate("Hi", PARAMS)[0].token_ids


def test_a_cpu_is_the_device_where_there_is_no_gpu(
    llm: LLM, checkpoint: Path, tmp_path: Path
) -> None:
    if not torch.cuda.is_available():
        assert llm.runtime.decoder.device.type == "cpu"
    with pytest.raises(ArgumentError, match="no device is called 'tpu:0'"):
        LLM(checkpoint, PLAN, device="tpu:0")


def test_a_text_that_no_tokenizer_takes_is_one_error(llm: LLM) -> None:
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    bad, good = llm.generate(["half of a pair: \ud800", [5, 6]], params)
    assert (bad.finish_reason, good.finish_reason) == ("error", "length")
    with pytest.raises(ArgumentError, match="SamplingParams, not int"):
        llm.generate([[5, 6]], 5)  # type: ignore[arg-type]


def test_a_text_that_is_much_too_long_is_not_read_to_its_end(llm: LLM) -> None:
    lengths = list[int]()

    def tokenizer(text: str, **_: Any) -> dict[str, list[int]]:  # a token for 1000 characters
        lengths.append(len(text))
        return {"input_ids": [5] * (len(text) // 1000)}

    reader, most = PromptReader(tokenizer), 100  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="of 100000000 characters has more than 100 tokens"):
        reader.read("a" * 100_000_000, most)
    assert lengths[-1] < 10_000_000
    lengths.clear()
    assert len(reader.read("a" * 100_000, most)[1]) == 100  # few tokens, though many characters
    assert lengths[-1] == 100_000
    long = "a " * 100_000
    assert "has more than 96 tokens" in llm.generate(long, PARAMS)[0].error
    assert len(llm.encode(long)) > len(llm.encode("a " * 100, 200)) > 99
    with pytest.raises(ArgumentError, match="has more than 200 tokens"):
        llm.encode(long, 200)


@pytest.mark.parametrize(
    "prompt",
    [
        [1, 2.5],
        [1.0, 2.0],
        [True, False],
        [5, None],
        [[5]],
        {"prompt": 5},
        {"prompt": 5, "prompt_token_ids": [5]},
        {"prompt_token_ids": [5.0]},
        {"prompt_token_ids": "5"},
        {5: 6},
        {},
        b"Hi",
        None,
        5,
        {1, 2},
        torch.tensor([5]),
        torch.tensor(5.0),
        [10**400],
        [],
        "",
    ],
    ids=str,
)
def test_a_wrong_prompt_is_one_result_with_an_error(llm: LLM, prompt: Any) -> None:
    good, bad, *more = llm.generate([[5, 6], prompt, [5, 6]], PARAMS)
    assert (good.error, len(more), more[0].error) == ("", 1, "")
    assert (bad.index, bad.finish_reason, bad.token_ids) == (1, "error", ())
    assert bad.error
    assert "\n" not in bad.error


@pytest.mark.parametrize("numbers", [[1, 2.5], [1.0], [5, True], [float("nan")], [1j]])
def test_a_list_of_numbers_is_one_prompt(llm: LLM, numbers: list[Any]) -> None:
    (found,) = llm.generate(numbers, PARAMS)
    assert "token ids are whole numbers" in found.error


def test_a_flat_tensor_or_array_is_one_prompt(llm: LLM) -> None:
    (wanted,) = llm.generate([5, 6, 7], PARAMS)
    for ids in (torch.tensor([5, 6, 7]), np.array([5, 6, 7])):
        assert llm.generate(ids, PARAMS) == [wanted]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "arguments",
    [
        (5,),
        (torch.tensor(5),),
        ("Hi", "greedy"),
        ("Hi", torch.tensor(0)),
        ("Hi", PARAMS, 5),
        ("Hi", PARAMS, [[5], [5]]),
    ],
)
def test_arguments_of_other_types_are_refused(llm: LLM, arguments: tuple[Any, ...]) -> None:
    with pytest.raises(ArgumentError):
        list(llm.stream(*arguments))


def test_what_the_prompts_of_a_generator_raise_is_not_changed(llm: LLM) -> None:
    with pytest.raises(ZeroDivisionError):
        llm.generate(f"{1 / one}" for one in (1, 0))


def test_parameters_in_a_dict_are_refused_as_a_dict(llm: LLM) -> None:
    with pytest.raises(ArgumentError, match="not dict"):
        llm.generate("Hi", {"temperature": 0})  # type: ignore[arg-type]


@pytest.mark.parametrize("continuation", [[2.0], "ab", 5, [], [10**9], [None], {5: 6}])
def test_a_wrong_continuation_is_one_result(llm: LLM, continuation: Any) -> None:
    (found,) = llm.stream("Hi", PARAMS, [continuation])
    assert found.finish_reason == "error"


@pytest.mark.parametrize("field", SamplingParams.__dataclass_fields__)
def test_sampling_parameters_are_checked_when_they_are_made(field: str) -> None:
    wrong: list[Any] = [-5, 1.5j, [[]], {}, object(), float("nan"), float("inf"), "", b"x"]
    if field != "ignore_eos":
        wrong.append(-(10**400))
    for value in wrong:
        if (field in ("stop_token_ids", "stop") and value == []) or (field, value) == (
            "logit_bias",
            {},
        ):
            continue
        with pytest.raises(ArgumentError, match=rf"^{field} is ") as refusal:
            SamplingParams(**{field: value})
        assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("field", ["temperature", "repetition_penalty", "top_p", "min_p"])
def test_numbers_beyond_all_floats_are_refused(field: str) -> None:
    with pytest.raises(ArgumentError, match=rf"^{field} is "):
        SamplingParams(**{field: 10**400})
