"""`generate` of models whose layers have windows, and caches that go back."""

from __future__ import annotations

import pytest
import torch

import qoff
from qoff.errors import ArgumentError
from qoff.kvcache import PackedCache
from qoff.models.convert.convert import convert
from tests.tiny_models import QUANT, save_model, save_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> qoff.QoffForCausalLM:
    folder = tmp_path_factory.mktemp("windowed")
    sizes = {"head_dim": 64, "max_position_embeddings": 1024, "sliding_window": 100}
    save_model(folder / "model", "gemma3", **sizes)
    save_tokenizer(folder / "model")
    convert(folder / "model", folder / "checkpoint", quant=QUANT)
    return qoff.load(folder / "checkpoint", device="cpu", kv=4)[0]


def asked(model: qoff.QoffForCausalLM, cache: qoff.QoffCache | None, **how: object) -> torch.Tensor:
    torch.manual_seed(3)
    ids = torch.randint(4, 128, (1, 700))
    found = model.generate(ids, past_key_values=cache, max_new_tokens=40, **how)
    assert isinstance(found, torch.Tensor)
    return found


@pytest.mark.parametrize("how", [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 5}], ids=str)
def test_tokens_are_those_with_all_blocks(
    how: dict[str, object], model: qoff.QoffForCausalLM
) -> None:
    kept = qoff.QoffCache(model)
    assert torch.equal(
        asked(model, None, do_sample=False, **how), asked(model, kept, do_sample=False, **how)
    )
    assert isinstance(kept.tokens, PackedCache)
    assert len(kept.tokens.groups) == 1


def test_a_cache_that_keeps_all_goes_back_anywhere(model: qoff.QoffForCausalLM) -> None:
    kept, frees = qoff.QoffCache(model), qoff.QoffCache(model, keeps=False)
    logits = []
    for cache in (kept, frees):
        asked(model, cache, do_sample=False)
        cache.crop(650 - cache.get_seq_length())
        logits.append(model(torch.tensor([[5, 6]]), past_key_values=cache).logits)
    assert torch.equal(*logits)
    held = []
    for cache in (kept, frees):
        assert isinstance(cache.tokens, PackedCache)
        held.append(sum(len(g.live(0)) * len(g.group.layers) for g in cache.tokens.groups))
    assert held[1] < held[0] == 3 * cache.tokens.packed[0] // 64
    kept.crop(10 - kept.get_seq_length())
    with pytest.raises(ArgumentError, match="cannot be forgotten; start with an empty cache"):
        frees.crop(10 - frees.get_seq_length())
    assert frees.get_seq_length() == 652
    frees.reset()
    assert frees.get_seq_length() == 0
