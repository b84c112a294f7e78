"""Continuations that are given: how likely the model finds them, token by token."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from qoff.engine import LLM, Completion, SamplingParams
from qoff.errors import ArgumentError
from qoff.kvcache import KVQuant
from qoff.kvcache.store.placement import KVPlacement
from qoff.plan import Plan
from tests.tiny_models import reference_model, tiny_checkpoint

CONTEXT = 240
PROMPTS = [[5 + 7 * i % 90 for i in range(n)] for n in (150, 3, 70)]
GIVEN = [[17, 40, 9], [11] * 30, [99]]
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
UNPACKED = Plan(batch_size=4, context=CONTEXT, kv=KVQuant(window=CONTEXT))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.getbasetemp(), "llama-head64")


def run(checkpoint: Path, plan: Plan, given: list[list[int]] | None = GIVEN) -> list[Completion]:
    """Sorted by prompt and sample; continuations come last of each prompt."""
    with LLM(checkpoint, plan) as llm:
        found = list(llm.stream(PROMPTS, PARAMS, given))
        assert all(llm.blocks.used(tier) == 0 for tier in ("device", "host", "disk"))
    return sorted(found, key=lambda result: (result.index, result.sample))


def chosen(result: Completion) -> list[float]:
    """The log-probabilities of a continuation's tokens."""
    assert result.logprobs is not None
    steps = zip(result.token_ids, result.logprobs, strict=True)
    found = [step[token].logprob for token, step in steps]
    assert result.cumulative_logprob == sum(found)
    return found


def test_log_probabilities_are_the_models(checkpoint: Path) -> None:
    model = reference_model(checkpoint)
    found = [result for result in run(checkpoint, UNPACKED) if result.finish_reason == "given"]
    for prompt, given, result in zip(PROMPTS, GIVEN, found, strict=True):
        ids = torch.tensor([prompt + given])
        with torch.inference_mode():
            rows = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        wanted = rows.gather(1, torch.tensor(given)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(chosen(result)), wanted, atol=1e-3, rtol=0)
        assert (result.token_ids, result.sample) == (tuple(given), 1)


@pytest.mark.parametrize("placement", [KVPlacement(), KVPlacement(0.5, 0.0)])
def test_answers_do_not_notice(placement: KVPlacement, checkpoint: Path) -> None:
    plan = Plan(batch_size=2, context=CONTEXT, kv=KVQuant(window=16), kv_placement=placement)
    found = run(checkpoint, plan)
    assert [r.finish_reason for r in found] == ["length", "given"] * 3
    assert [r for r in found if r.finish_reason == "length"] == run(checkpoint, plan, None)


def test_a_greedy_answer_given_is_no_less_likely_than_others(checkpoint: Path) -> None:
    plan = Plan(batch_size=2, context=CONTEXT, kv=KVQuant(window=16, attention_top=0.5))
    answers = [list(result.token_ids) for result in run(checkpoint, plan, None)]
    best = run(checkpoint, plan, answers)[1::2]
    others = run(checkpoint, plan, [[a[0], (a[1] + 1) % 128, *a[2:]] for a in answers])[1::2]
    for first, second in zip(best, others, strict=True):
        assert chosen(first)[0] == chosen(second)[0]
        assert chosen(first)[1] > chosen(second)[1]


def test_what_cannot_follow_is_an_error_of_that_prompt(checkpoint: Path) -> None:
    found = run(checkpoint, UNPACKED, [[], [128], [5] * 171])
    assert [result.finish_reason for result in found] == ["error"] * 3
    for result, message in zip(
        found, ("continuation has no tokens", "continuation has token 128", "171 new"), strict=True
    ):
        assert message in result.error


def test_there_is_one_for_each_prompt(checkpoint: Path) -> None:
    with LLM(checkpoint, UNPACKED) as llm, pytest.raises(ArgumentError, match="3 prompts, but"):
        list(llm.stream(PROMPTS, PARAMS, GIVEN[:2]))
