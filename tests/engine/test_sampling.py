"""Sampling options, on logits and on a tiny model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from qoff.engine import LLM, Completion, SamplingParams
from qoff.engine.answers import completion
from qoff.engine.request import Logprob, Sequence
from qoff.engine.sampling import LogitsRow, Sampler
from qoff.errors import ArgumentError
from qoff.kernels import sampling
from qoff.kvcache import KVQuant
from qoff.models.native.choices import Choice
from qoff.plan import Plan
from tests.tiny_families import EOS
from tests.tiny_models import reference_model, tiny_checkpoint

CPU = torch.device("cpu")
LOGITS = torch.tensor([2.0, 1.9, -1.0, 1.0, 0.0])


def drawn(
    logits: Tensor = LOGITS, *answer: int, prompt: tuple[int, ...] = (2,), **options: Any
) -> int:
    """The next token of an answer, taken greedily."""
    params = SamplingParams(**{"temperature": 0, **options})
    sequence = Sequence(0, 0, None, prompt, params, 16, frozenset(params.stop_token_ids or ()))
    sequence.answer.extend(answer)
    before = logits.clone()
    sampler = Sampler(len(logits), 1, 16, CPU)
    sampler.begin(0, sequence)
    assert sampler.draw([LogitsRow(0, sequence, logits)]) == 1
    assert torch.equal(logits, before)  # forks draw from them, too
    return sequence.answer[-1]


def test_penalties_are_vllms() -> None:
    assert drawn() == 0
    assert drawn(LOGITS, 0, presence_penalty=0.2) == 1
    assert drawn(LOGITS, prompt=(0,), presence_penalty=2, frequency_penalty=2) == 0
    assert drawn(LOGITS, 0, frequency_penalty=0.09) == 0
    assert drawn(LOGITS, 0, 3, 0, frequency_penalty=0.09) == 1
    assert drawn(LOGITS, 0, presence_penalty=2, frequency_penalty=-2) == 0
    assert drawn(LOGITS, prompt=(0,), repetition_penalty=1.1) == 1
    assert drawn(LOGITS, 1, prompt=(0,), repetition_penalty=1.1) == 0
    # A head may have fewer rows than the embedding.
    assert drawn(LOGITS, prompt=(0, 9), repetition_penalty=1.1) == 1
    assert drawn(LOGITS, prompt=(9, 0), repetition_penalty=1.1) == 1
    assert drawn(LOGITS, prompt=(0, 9999), repetition_penalty=1.1) == 1
    negative = torch.tensor([-1.0, -1.2, -3.0])
    assert drawn(negative, 0, 0, repetition_penalty=1.3) == 1  # once, however often it came


def test_whole_numbers_are_taken_as_floats() -> None:
    penalties = {"presence_penalty": 2, "frequency_penalty": -2, "repetition_penalty": 1}
    assert drawn(LOGITS, 0, **penalties) == 0
    assert drawn(temperature=2**70, top_p=1, min_p=0) in range(5)


def test_numbers_of_numpy_are_pythons() -> None:
    found = SamplingParams(
        n=np.int64(2), temperature=np.float32(0.5), seed=np.uint8(255), max_tokens=np.int32(9),
        ignore_eos=np.bool_(True), stop_token_ids=[np.int64(5), 6], logit_bias={np.int64(7): 1},
    )  # type: ignore[arg-type]  # fmt: skip
    assert found == SamplingParams(
        n=2, temperature=0.5, seed=255, max_tokens=9, ignore_eos=True, stop_token_ids=[5, 6],
        logit_bias={7: 1},
    )  # fmt: skip
    assert type(found.n) is type(found.seed) is int
    for wrong in (np.bool_(True), np.float64(2), np.str_("2")):
        with pytest.raises(ArgumentError, match="top_k is"):
            SamplingParams(top_k=wrong)  # type: ignore[arg-type]


def test_an_answer_does_not_end_before_min_tokens() -> None:
    options: dict[str, Any] = {"stop_token_ids": [0, 99], "min_tokens": 2}
    assert [drawn(LOGITS, *[3] * n, **options) for n in range(3)] == [1, 1, 0]


def test_top_k_and_top_p_bound_what_is_drawn() -> None:
    for options in ({"top_k": 2}, {"top_p": 0.6}, {"min_p": 0.8}):
        found = {drawn(temperature=1.0, seed=seed, **options) for seed in range(60)}
        assert found == {0, 1}
    # Without the tokens below min_p, the likeliest alone has the probability top_p.
    skewed = torch.tensor([0.5, 0.3, 0.2]).log()
    for min_p, top_p, wanted in ((0.0, 0.55, {0, 1}), (0.5, 0.55, {0}), (0.5, 0.7, {0, 1})):
        options = {"min_p": min_p, "top_p": top_p}
        found = {drawn(skewed, temperature=1.0, seed=seed, **options) for seed in range(60)}
        assert found == wanted
    for penalty in (1.0, 1.001):  # another way to the same tokens
        options = {"temperature": 3, "repetition_penalty": penalty}
        for off in (0, -1, 9999):
            assert len({drawn(seed=seed, top_k=off, **options) for seed in range(60)}) == 5
    unseeded = torch.zeros(1 << 20)
    assert drawn(unseeded, temperature=1.0) != drawn(unseeded, temperature=1.0)


MANY = [
    SamplingParams(temperature=0),
    SamplingParams(seed=1),
    SamplingParams(seed=1, top_k=9, logprobs=2),
    SamplingParams(seed=5, presence_penalty=0.5),
    SamplingParams(seed=2, top_p=0.1, repetition_penalty=1.4),
    SamplingParams(seed=3, min_p=0.01, frequency_penalty=1.0, presence_penalty=-0.5),
    SamplingParams(temperature=0, repetition_penalty=2.0, logprobs=0),
    SamplingParams(seed=4, temperature=2.0, min_tokens=4, stop_token_ids=[3, 4]),
]


def answers_to(
    logits: Tensor, together: bool, wrong: int | None = None
) -> list[tuple[list[int], list[dict[int, Logprob]], str]]:
    """Answers of MANY by logits [steps, V], in one call a step, or one each; wrong: has NaN."""
    sampler = Sampler(logits.shape[1], len(MANY), 40, CPU)
    sequences = [
        Sequence(i, 0, None, (5, i, 5), params, 16, frozenset(params.stop_token_ids or ()))
        for i, params in enumerate(MANY)
    ]
    for place, one in enumerate(sequences):
        sampler.begin(place, one)
    for row in logits:
        rows = [LogitsRow(i, one, row) for i, one in enumerate(sequences) if not one.error]
        if wrong is not None:
            rows[wrong] = rows[wrong]._replace(logits=row.where(row < row.max(), torch.nan))
        for some in [rows] if together else [[row] for row in rows]:
            sampler.draw(some)
    return [(one.answer, one.logprobs, one.error) for one in sequences]


def test_a_token_does_not_depend_on_the_other_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = 2 * torch.randn(6, 500, generator=torch.Generator().manual_seed(0))
    alone = answers_to(logits, together=False)
    assert answers_to(logits, together=True) == alone
    monkeypatch.setattr(sampling, "_TOGETHER", 2 * sampling.columns(500))
    monkeypatch.setattr(sampling, "_SCORED", sampling.columns(500))
    assert answers_to(logits, together=True) == alone
    # Penalties of each step are of all tokens so far, as if they were counted then.
    for (answer, *_), params in zip(alone, MANY, strict=True):
        if params.temperature == 0:
            for step in range(6):
                options = {"temperature": 0, "repetition_penalty": params.repetition_penalty}
                prompt = (5, MANY.index(params), 5)
                assert answer[step] == drawn(logits[step], *answer[:step], prompt=prompt, **options)


@pytest.mark.parametrize("wrong", range(len(MANY)))
def test_a_row_that_is_not_finite_is_an_error_of_its_own(wrong: int) -> None:
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(0))
    good, found = answers_to(logits, together=True), answers_to(logits, together=True, wrong=wrong)
    assert found[wrong][:2] == ([], [])
    assert "not finite" in found[wrong][2]
    assert good[:wrong] + good[wrong + 1 :] == found[:wrong] + found[wrong + 1 :]


@pytest.mark.parametrize(
    "given",
    [
        [{}, {"top_p": 0.1}, {"min_p": 0.3}],
        [{"top_k": 9}, {"top_k": 9999, "top_p": 0.1}, {"top_k": 2, "min_p": 0.3}],
    ],
)
def test_rows_are_drawn_together_on_a_gpu_as_one_by_one_on_a_cpu(
    given: list[dict[str, Any]],
) -> None:
    logits = 2 * torch.randn(500, generator=torch.Generator().manual_seed(0))
    params = [SamplingParams(seed=seed, **each) for seed in range(20) for each in given]
    sampler, rows = Sampler(500, len(params), 16, CPU), []
    for i, each in enumerate(params):
        rows.append(LogitsRow(i, Sequence(i, 0, None, (2,), each, 16), logits))
        sampler.begin(i, rows[-1].sequence)
    padded = torch.full((len(rows), sampling.columns(500)), -torch.inf)
    padded[:, :500] = logits
    found = sampling.draw_(padded, sampler._drawn_by(rows), sampler._warp(rows)).tolist()
    assert found == [
        drawn(logits, temperature=1, seed=i // len(given), **given[i % len(given)])
        for i in range(len(params))
    ]


def test_samples_of_a_seed_are_drawn_by_seeds_of_their_own() -> None:
    def noise(seed: int, sample: int) -> list[Any]:
        sequence = Sequence(0, sample, None, (1,), SamplingParams(seed=seed), 16)
        sampler = Sampler(99, 1, 16, CPU)
        sampler.begin(0, sequence)
        return sampler.noise([(0, sequence)], 2).tolist()

    assert noise(1, 2) == noise(3, 0) != noise(1, 0)


def test_several_tokens_at_once_are_all_drawn_or_all_the_likeliest() -> None:
    def choice(*temperatures: float) -> Choice | None:
        rows = [
            (i, Sequence(i, 0, None, (1,), SamplingParams(temperature=one), 16))
            for i, one in enumerate(temperatures)
        ]
        return Sampler(99, 2, 16, CPU).choice(rows)

    greedy, drawing = choice(0, 0), choice(1, 0.5)
    assert greedy is not None
    assert drawing is not None
    assert greedy.shapes is None
    assert drawing.shapes is not None
    assert choice(0, 1) is None


def test_tokens_that_are_as_likely_have_one_rank() -> None:
    """The token's own is how many are likelier, wherever it stands among the likeliest."""
    params = SamplingParams(temperature=0, logprobs=2, logit_bias={1: 1.0})
    sequence = Sequence(0, 0, None, (2,), params, 16)
    sampler = Sampler(3, 1, 16, CPU)
    sampler.begin(0, sequence)
    sampler.draw([LogitsRow(0, sequence, torch.tensor([1.0, 1.0, 0.0]))])
    assert sequence.answer == [1]
    assert {token: one.rank for token, one in sequence.logprobs[0].items()} == {1: 1, 0: 1}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.getbasetemp(), "llama-head64")


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    plan = Plan(batch_size=4, context=120, kv=KVQuant(window=120))  # nothing is packed
    with LLM(checkpoint, plan) as llm:
        yield llm


def test_logprobs_are_the_models(llm: LLM, checkpoint: Path) -> None:
    prompt = [5 + 7 * i % 90 for i in range(20)]
    options: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True, "seed": 3}
    plain, found = (
        llm.generate(prompt, SamplingParams(temperature=2.0, logprobs=count, **options))[0]
        for count in (None, 3)
    )
    assert (plain.token_ids, plain.logprobs) == (found.token_ids, None)
    ids = torch.tensor([[*prompt, *found.token_ids]])
    with torch.inference_mode():
        rows = reference_model(checkpoint)(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    assert found.logprobs is not None
    for token, step, row in zip(found.token_ids, found.logprobs, rows, strict=True):
        best = row.topk(3).indices.tolist()
        assert set(step) == {token, *best}
        assert next(iter(step)) == token
        order = row.argsort(descending=True).tolist()
        for other, one in step.items():
            assert one.logprob == pytest.approx(float(row[other]), abs=1e-3)
            assert one.rank == order.index(other) + 1


def test_logprobs_end_with_the_tokens(llm: LLM) -> None:
    (free,) = llm.generate("abc", SamplingParams(temperature=0, ignore_eos=True))
    token = free.token_ids[5]
    params = SamplingParams(temperature=0, ignore_eos=True, stop_token_ids=[token], logprobs=0)
    (found,) = llm.generate("abc", params)
    assert found.logprobs is not None
    assert len(found.logprobs) == len(found.token_ids) == free.token_ids.index(token)


def test_a_stop_text_is_found_across_tokens_and_cut_off() -> None:
    class Words:
        """One token a letter."""

        def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
            return "".join(map(chr, tokens))

    def answer(text: str, **options: Any) -> str | None:
        sequence = Sequence(0, 0, None, (1,), SamplingParams(**options), 99)
        for letter in text:
            sequence.answer.append(ord(letter))
            found = completion(sequence, Words())  # type: ignore[arg-type]
            if found is not None:
                assert found.finish_reason == "stop"
                return found.text
        return None

    assert answer("one. two. three", stop=". t") == "one"
    assert answer("one. two. three", stop=["x", "two", "one."]) == ""
    assert answer("one. two. three", stop="o", min_tokens=4, max_tokens=None) == "one. tw"
    assert answer("one. two. three", stop=". t", min_tokens=5, max_tokens=None) == "one"
    assert answer("one. two. three", stop=". t", min_tokens=6, max_tokens=None) == "one. two"
    assert answer("one. two. three", stop=["four"], max_tokens=None) is None


def test_answers_end_at_the_models_end_token_unless_it_is_ignored(llm: LLM) -> None:
    prompts = [[i + 5] for i in range(8)]

    def answers(**options: Any) -> list[Completion]:
        each = [SamplingParams(temperature=3.0, seed=i, max_tokens=90, **options) for i in range(8)]
        return llm.generate(prompts, each)

    ends, ignores, late = answers(), answers(ignore_eos=True), answers(min_tokens=60)
    assert any(one.finish_reason == "stop" for one in ends)
    assert all(len(one.token_ids) == 90 for one in ignores)
    assert all(len(one.token_ids) >= 60 for one in late)
    assert all(EOS not in one.token_ids for one in (*ends, *late))


@pytest.mark.parametrize("penalty", [10**30, 1e30, 1e-30])
def test_any_penalty_draws_a_token(penalty: float) -> None:
    assert 0 <= drawn(repetition_penalty=penalty, temperature=1) < len(LOGITS)
