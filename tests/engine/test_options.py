"""vLLM's options of prompts and answers in `qoff.LLM`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from qoff.engine import LLM, SamplingParams
from qoff.errors import ArgumentError
from qoff.kvcache import KVQuant
from qoff.plan import Plan
from tests.tiny_models import reference_model, tiny_checkpoint

PLAN = Plan(batch_size=3, context=160, kv=KVQuant(window=128))
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [[5 + i * 7 % 90 for i in range(40)], [11, 12, 13], [20]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.getbasetemp(), "llama-head64")


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    with LLM(checkpoint, PLAN, device="cpu") as opened:
        yield opened


@pytest.mark.parametrize("drafts", [0, 2])
def test_log_probabilities_of_prompts_are_those_of_the_model(checkpoint: Path, drafts: int) -> None:
    params = replace(PARAMS, prompt_logprobs=2, n=1)
    with LLM(checkpoint, replace(PLAN, draft_tokens=drafts), device="cpu") as llm:
        plain = llm.generate(PROMPTS, PARAMS)
        found = llm.generate(PROMPTS, [params, params, PARAMS])
        (both, _) = llm.generate(PROMPTS[:1], replace(params, n=2))
    assert [one.token_ids for one in found] == [one.token_ids for one in plain]
    assert found[2].prompt_logprobs is None
    assert both.prompt_logprobs is not None
    assert len(both.prompt_logprobs) == len(PROMPTS[0])
    model = reference_model(checkpoint)
    for prompt, one in zip(PROMPTS[:2], found, strict=False):
        assert one.prompt_logprobs is not None
        first, *rest = one.prompt_logprobs
        assert first is None
        with torch.no_grad():
            logs = model(torch.tensor([prompt])).logits[0].log_softmax(1)
        for token, step, wanted in zip(prompt[1:], rest, logs, strict=False):
            assert step is not None
            assert step[token].logprob == pytest.approx(float(wanted[token]), abs=0.02)
            assert 1 in {each.rank for each in step.values()}
            assert len(step) in (2, 3)
        assert len(rest) == len(prompt) - 1


def test_a_prompt_that_is_read_again_has_its_log_probabilities_once(llm: LLM) -> None:
    """Both answers of a prompt begin again after it was read."""
    both = replace(PARAMS, n=2, max_tokens=100, prompt_logprobs=1)
    found = llm.stream(PROMPTS[:2], [both, replace(PARAMS, max_tokens=60)])
    assert next(found).index == 1
    with llm._rounds._changed:
        llm._rounds._places.begin_again()
    assert [len(one.prompt_logprobs or ()) for one in found] == [len(PROMPTS[0])] * 2


def test_a_stop_text_may_stay_in_the_text(llm: LLM) -> None:
    (whole,) = llm.generate([PROMPTS[1]], PARAMS)
    stop = whole.text[4:6]
    (cut,) = llm.generate([PROMPTS[1]], replace(PARAMS, stop=stop))
    (kept,) = llm.generate(
        [PROMPTS[1]], replace(PARAMS, stop=stop, include_stop_str_in_output=True)
    )
    assert kept.text == cut.text + stop
    assert kept.finish_reason == cut.finish_reason == "stop"
    last = whole.token_ids[3]
    ends = replace(PARAMS, stop_token_ids=[last], skip_special_tokens=False)
    (cut,) = llm.generate([PROMPTS[1]], ends)
    (kept,) = llm.generate([PROMPTS[1]], replace(ends, include_stop_str_in_output=True))
    assert llm.tokenizer is not None
    assert kept.text == cut.text + llm.tokenizer.decode([last])
    assert kept.token_ids == cut.token_ids


def test_texts_are_made_as_asked_for(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    params = replace(PARAMS, detokenize=False, n=2)
    (none, _) = llm.generate([PROMPTS[1]], params, use_tqdm=True)
    assert (none.text, len(none.token_ids)) == ("", 12)
    assert "2/2" in capsys.readouterr().err

    def end(_: list[int], logits: Tensor) -> Tensor:
        logits[2] = 1e4
        return logits

    params = replace(PARAMS, logits_processors=[end], max_tokens=2)
    assert llm.generate([PROMPTS[1]], params)[0].text == ""
    assert (
        llm.generate([PROMPTS[1]], replace(params, skip_special_tokens=False))[0].text == "</s>" * 2
    )


def test_functions_change_logits(llm: LLM) -> None:
    seen = []

    def only(prompt: list[int], answer: list[int], logits: Tensor) -> Tensor:
        seen.append((tuple(prompt), tuple(answer)))
        return torch.full_like(logits, -torch.inf).index_fill(0, torch.tensor(7 + len(answer)), 0)

    def up(answer: list[int], logits: Tensor) -> Tensor:
        return logits * (2 if answer else 1)

    functions = [up, only]
    found = llm.generate(PROMPTS[:2], [replace(PARAMS, logits_processors=functions), PARAMS])
    assert found[0].token_ids == tuple(range(7, 19))
    assert found[1].token_ids == llm.generate([PROMPTS[1]], PARAMS)[0].token_ids
    assert seen[3] == (tuple(PROMPTS[0]), (7, 8, 9))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_are_biased_by_token(temperature: float, llm: LLM) -> None:
    params = replace(PARAMS, temperature=temperature, seed=3)
    plain = [one.token_ids for one in llm.generate(PROMPTS[:2], params)]
    likeliest = plain[0][0]
    each = [replace(params, logit_bias={9: 100, 8: -100}), replace(params, logit_bias={9: 0.0})]
    found = [one.token_ids for one in llm.generate(PROMPTS[:2], each)]
    assert found == [(9,) * len(plain[0]), plain[1]]
    (other,) = llm.generate(PROMPTS[:1], replace(params, logit_bias={likeliest: -100}))
    assert likeliest not in other.token_ids
    wrong = replace(params, logit_bias={128: 1.0})
    assert "there are 0 to 127" in llm.generate(PROMPTS[:1], wrong)[0].error


def test_a_function_that_fails_ends_its_answer_alone(llm: LLM) -> None:
    wrong = [
        lambda *_: 1 // 0,
        lambda _, logits: logits[:3],
        lambda _, logits: logits.fill_(-torch.inf),
    ]
    params = [replace(PARAMS, logits_processors=[one]) for one in wrong]
    found = llm.generate([PROMPTS[1]] * 4, [*params, PARAMS])
    assert [one.finish_reason for one in found] == ["error", "error", "error", "length"]
    assert "integer" in found[0].error
    assert "returns no logits [128]" in found[1].error
    assert "leaves no token" in found[2].error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt_logprobs": -1}, "prompt_logprobs is -1; use 0 or more, or None"),
        ({"detokenize": 1}, "detokenize is 1; use True or False"),
        ({"stop": "a", "detokenize": False}, "stop texts need detokenize=True"),
        ({"logits_processors": [3]}, "None, or a list of functions"),
        ({"logit_bias": {3: 101}}, "numbers from -100 to 100 by token ids"),
        ({"logit_bias": {"3": 1}}, "numbers from -100 to 100 by token ids"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        SamplingParams(**options)  # type: ignore[arg-type]
