"""`generate` over a packed KV cache: same interface, nearly the same numbers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import qoff
from qoff.errors import ArgumentError, OpError
from qoff.kvcache import KVCache, KVQuant, MixedCache, PackedCache, PlainCache
from tests.tiny_models import tiny_checkpoint
from tests.tolerances import assert_close

PROMPTS = ["a prompt of some length, " * 7, "a short one", "?" * 80]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.getbasetemp(), "llama-head64")


@pytest.fixture(scope="module")
def loaded(path: Path) -> Iterator[tuple[Any, Any]]:
    model, tokenizer = qoff.load(path, kv=KVQuant(8, 8, 16))
    with model:
        yield model, tokenizer


@pytest.fixture(scope="module")
def plain(path: Path) -> Iterator[Any]:
    model, _ = qoff.load(path, kv=None)
    with model:
        yield model


def log_probability(model: Any, sequence: torch.Tensor, prompt: int) -> float:
    """Of the tokens after the prompt, all read in one pass."""
    logits = model(sequence[None]).logits[0].log_softmax(-1)
    tokens = sequence[prompt:]
    return float(logits[prompt - 1 : -1].gather(1, tokens[:, None]).sum())


@pytest.mark.parametrize("beams", [1, 3])
def test_sequences_are_as_likely_as_an_uncompressed_cache_says(
    beams: int, loaded: tuple[Any, Any], plain: Any
) -> None:
    model, tokenizer = loaded
    ids = tokenizer(PROMPTS[0], return_tensors="pt").input_ids
    out = model.generate(
        ids, max_new_tokens=70, min_new_tokens=70, do_sample=False, num_beams=beams,
        num_return_sequences=beams, return_dict_in_generate=True, output_scores=True,
        length_penalty=0.0,
    )  # fmt: skip
    scores = model.compute_transition_scores(
        out.sequences, out.scores, getattr(out, "beam_indices", None), normalize_logits=beams == 1
    ).sum(1)
    for sequence, score in zip(out.sequences, scores, strict=True):
        assert float(score) == pytest.approx(
            log_probability(plain, sequence, ids.shape[1]), rel=0.02
        )


def test_a_batch_generates_what_each_prompt_does_alone(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    options = {"max_new_tokens": 20, "min_new_tokens": 20, "do_sample": False}
    together = model.generate(**tokenizer(PROMPTS, return_tensors="pt", padding=True), **options)
    for prompt, row in zip(PROMPTS, together, strict=True):
        alone = model.generate(**tokenizer(prompt, return_tensors="pt"), **options)
        assert torch.equal(row[-20:], alone[0, -20:])


def test_logits_are_close_and_the_cache_is_packed(loaded: tuple[Any, Any], plain: Any) -> None:
    model, tokenizer = loaded
    inputs = tokenizer(PROMPTS, return_tensors="pt", padding=True)
    first, second = model(**inputs), plain(**inputs)
    assert torch.equal(first.logits, second.logits)  # nothing was packed before this pass
    more = torch.full((3, 5), 40)
    mask = torch.cat((inputs["attention_mask"], torch.ones(3, 5, dtype=torch.int64)), 1)
    found, wanted = (
        m(more, attention_mask=mask, past_key_values=out.past_key_values).logits
        for m, out in ((model, first), (plain, second))
    )
    assert not torch.equal(found, wanted)
    assert_close(found, wanted, tolerance=2e-2)
    cache = first.past_key_values.tokens
    assert isinstance(cache, PackedCache)
    assert cache.packed == [128, 0, 64]


def test_a_conversation_goes_back_and_on(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    ids = tokenizer(PROMPTS[0], return_tensors="pt").input_ids
    out = model(ids)
    cache = out.past_key_values
    model(torch.full((1, 70), 50), past_key_values=cache)
    assert cache.tokens.packed == [192]
    cache.crop(-70)
    assert cache.get_seq_length() == ids.shape[1]
    again = model(torch.tensor([[50]]), past_key_values=cache).logits
    direct = model(torch.cat((ids, torch.tensor([[50]])), 1)).logits[:, -1:]
    assert_close(again, direct, tolerance=2e-2)


@pytest.mark.parametrize(("bits", "kind"), [(16, PlainCache), ("8/1:16", MixedCache)])
def test_layers_of_16_bits_are_not_packed(
    bits: int | str, kind: type[KVCache], path: Path, plain: Any
) -> None:
    ids = torch.randint(4, 128, (2, 150))
    model, _ = qoff.load(path, kv=KVQuant.of(bits, 16))
    with model:
        out = model(ids)
        cache = out.past_key_values
        assert isinstance(cache.tokens, kind)
        assert_close(out.logits, plain(ids).logits, tolerance=0.0)  # nothing is packed yet
        more = torch.randint(4, 128, (2, 70))
        found = model(more, past_key_values=cache).logits
        cache.crop(-70)
        cache.reorder_cache(torch.tensor([1, 0]))
        again = model(more.flip(0), past_key_values=cache).logits.flip(0)
    expected = plain(torch.cat((ids, more), 1)).logits[:, 150:]
    exact = kind is PlainCache
    assert_close(found, expected, tolerance=1e-5 if exact else 2e-2)
    assert_close(again, found, tolerance=1e-5 if exact else 2e-2)


def test_what_cannot_be_packed_is_refused_at_once(
    path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with pytest.raises(ArgumentError, match="4 or 8 bits, not 16 and 4"):
        qoff.load(path, kv=(16, 4))
    small = tiny_checkpoint(tmp_path_factory.getbasetemp(), "llama")
    with pytest.raises(OpError, match="heads of 16 channels"):
        qoff.load(small, kv=4)
