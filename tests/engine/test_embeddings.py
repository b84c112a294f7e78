"""Embeddings are transformers' last hidden states, pooled, whatever else the engine does."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from qoff.engine import LLM, PoolingParams, SamplingParams
from qoff.errors import ArgumentError, FormatError
from qoff.models.convert.convert import convert
from qoff.plan import Plan
from tests.module_models import module_checkpoint
from tests.tiny_models import QUANT, budgets, reference_model, save_model

TEXTS = ["One.", "A text of several words, longer than a pass reads at a time.", "Two"]
PLAN = Plan(batch_size=2, context=120, prefill_tokens=32)


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    with LLM(checkpoint, PLAN) as found:
        yield found


@pytest.fixture(scope="module")
def hidden(llm: LLM, checkpoint: Path) -> list[torch.Tensor]:
    """transformers' last hidden states of each text, [T, hidden_size]."""
    model = reference_model(checkpoint).model
    with torch.inference_mode():
        ids = [torch.tensor([llm.encode(text)]) for text in TEXTS]
        return [model(input_ids=one).last_hidden_state[0] for one in ids]


def vectors(llm: LLM, prompts: Any = TEXTS, **params: Any) -> torch.Tensor:
    found = llm.embed(prompts, PoolingParams(**params))
    assert [one.index for one in found] == [*range(len(found))]
    return torch.tensor([one.embedding for one in found])


@pytest.mark.parametrize("pooling", ["mean", "last", "first"])
def test_vectors_are_transformers_hidden_states_pooled(
    pooling: Any, llm: LLM, hidden: list[torch.Tensor]
) -> None:
    pools = {"mean": lambda x: x.mean(0), "last": lambda x: x[-1], "first": lambda x: x[0]}
    wanted = torch.stack([pools[pooling](one) for one in hidden])
    found = vectors(llm, pooling=pooling, normalize=False)
    assert torch.allclose(found, wanted, rtol=1e-3, atol=1e-3)
    short = vectors(llm, pooling=pooling, dimensions=5)
    assert torch.allclose(short, torch.nn.functional.normalize(found[:, :5]), atol=1e-5)


def test_streamed_weights_and_other_answers_change_nothing(checkpoint: Path, llm: LLM) -> None:
    alone = vectors(llm, pooling="mean")
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    wanted = llm.generate(["Hi there"], params)
    least, _ = budgets(checkpoint)
    bound = least + 2_600_000
    with LLM(checkpoint, replace(PLAN, device_memory=bound)) as streamed:
        answers = streamed.stream(["Hi there"], params)
        assert torch.equal(vectors(streamed, pooling="mean"), alone)
        (answer,) = answers
        assert streamed.runtime.store.stats.bytes_read > 0
    assert answer.token_ids == wanted[0].token_ids


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_parked_hidden_states_are_pooled_too(
    tier: Any, checkpoint: Path, llm: LLM, tmp_path: Path
) -> None:
    plan = replace(PLAN, activations=tier, batches=2, batch_size=1, spill_folder=tmp_path)
    with LLM(checkpoint, plan, device="cpu") as parked:
        assert torch.equal(vectors(parked), vectors(llm))


def test_token_ids_are_prompts_too(llm: LLM) -> None:
    ids = [list(llm.encode(text)) for text in TEXTS]
    assert torch.equal(vectors(llm, ids), vectors(llm))
    (one,) = llm.embed(TEXTS[0])
    assert (one.prompt, one.prompt_token_ids) == (TEXTS[0], tuple(ids[0]))
    assert sum(x * x for x in one.embedding) == pytest.approx(1)
    assert len(llm.embed([[5] * PLAN.context])) == 1  # no answer follows


def test_a_model_says_how_it_pools(tmp_path: Path) -> None:
    source = tmp_path / "source"
    save_model(source, "llama-head64")
    (source / "1_Pooling").mkdir()
    pooling = source / "1_Pooling" / "config.json"
    pooling.write_text(json.dumps({"pooling_mode_mean_tokens": True, "dimension": 1}))
    (source / "modules.json").write_text(json.dumps([{"type": "sentence_transformers.models.X"}]))
    convert(source, tmp_path / "qoff", quant=QUANT)
    with LLM(tmp_path / "qoff", PLAN) as llm:
        ids = [[5, 6, 7], [9]]
        assert torch.equal(vectors(llm, ids), vectors(llm, ids, pooling="mean", normalize=False))
        (tmp_path / "qoff" / "pooling.json").write_text('{"pooling_mode_max_tokens": true}')
        with pytest.raises(FormatError, match="pooling_mode_max_tokens"):
            llm.embed(ids)
    shutil.rmtree(tmp_path / "qoff")


def test_what_cannot_be_embedded_is_said(
    llm: LLM, tmp_path_factory: pytest.TempPathFactory
) -> None:
    for params in ({"pooling": "max"}, {"dimensions": 0}, {"normalize": "yes"}):
        with pytest.raises(ArgumentError, match=f"{next(iter(params))} is"):
            PoolingParams(**params)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="dimensions is 10000"):
        llm.embed("x", PoolingParams(dimensions=10_000))
    with pytest.raises(ArgumentError, match=r"prompt 1: .* longer than the plan's context of 120"):
        llm.embed([[5], [5] * 121])
    modules = module_checkpoint(tmp_path_factory.getbasetemp(), "stablelm")
    with LLM(modules, PLAN) as other, pytest.raises(ArgumentError, match="modules"):
        other.embed([[5]])
