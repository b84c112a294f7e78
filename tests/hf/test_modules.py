"""`qoff.load` of architectures without a spec: generate, caches, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import qoff
from qoff.errors import ArgumentError, OpError, QoffError
from qoff.kvcache import KVQuant
from tests.module_models import (
    HEADS_OF_64,
    MODULES,
    module_checkpoint,
    module_reference,
    module_source,
)
from tests.tiny_models import QUANT, load_budgets
from tests.tolerances import PACKED_8, assert_close

PROMPTS = ["hello world", "hi"]


@pytest.mark.parametrize("name", ["stablelm", "jamba", "bloom"])
def test_generate_gives_what_transformers_gives(base: Path, name: str) -> None:
    path = module_checkpoint(base, name)
    reference = module_reference(base, name)
    least, _ = load_budgets(path)
    model, tokenizer = qoff.load(path, device_memory=least)
    with model:
        inputs = tokenizer(PROMPTS, return_tensors="pt", padding=True)
        inputs.pop("token_type_ids", None)
        options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
        for beams in (1, 2):
            wanted = reference.generate(**inputs, num_beams=beams, **options)
            found = model.generate(**inputs, num_beams=beams, **options)
            assert torch.equal(found, wanted)


def test_a_source_is_converted_once(base: Path, tmp_path: Path) -> None:
    source = module_source(base, "stablelm")
    for _ in range(2):
        model, _ = qoff.load(source, quant=QUANT, cache_dir=tmp_path)
        with model:
            assert model.config.model_type == "stablelm"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_cache_goes_back_to_a_prompt_that_was_read(base: Path) -> None:
    model, _ = qoff.load(module_checkpoint(base, "stablelm"))
    with model:
        ids = torch.randint(3, 99, (1, 9))
        cache = qoff.QoffCache(model)
        first = model(ids, past_key_values=cache).logits
        assert cache.get_seq_length() == 9
        cache.crop(-4)
        again = model(ids[:, 5:], past_key_values=cache).logits
        torch.testing.assert_close(again, first[:, 5:], atol=1e-3, rtol=1e-3)
        assert "transformers' stablelm" in _refusal(base, cache)


def _refusal(base: Path, cache: Any) -> str:
    other, _ = qoff.load(module_checkpoint(base, "bloom"))
    with other, pytest.raises(OpError, match="made for another model") as refusal:
        other(torch.tensor([[3]]), past_key_values=cache)
    return str(refusal.value)


@pytest.mark.parametrize("name", ["stablelm-head64", "vaultgemma-head64", "jamba-head64"])
@pytest.mark.parametrize("beams", [1, 2])
def test_qoffs_own_cache_generates_what_transformers_does(
    base: Path, name: str, beams: int
) -> None:
    reference = module_reference(base, name)
    unpacked = KVQuant(16, 16)
    model, tokenizer = qoff.load(module_checkpoint(base, name), kv=unpacked)
    with model:
        inputs = tokenizer(["hello world, " * 10, "hi"], return_tensors="pt", padding=True)
        inputs.pop("token_type_ids", None)
        options = {"max_new_tokens": 8, "do_sample": False, "num_beams": beams}
        assert torch.equal(
            model.generate(**inputs, **options), reference.generate(**inputs, **options)
        )


def test_a_packed_cache_goes_back_to_a_prompt_that_was_read(base: Path) -> None:
    model, _ = qoff.load(module_checkpoint(base, "stablelm-head64"), kv=KVQuant(8, 8, 16))
    with model:
        ids = torch.randint(3, 99, (1, 140))
        cache = qoff.QoffCache(model)
        first = model(ids, past_key_values=cache).logits
        more = model(ids[:, :1], past_key_values=cache).logits
        cache.crop(-5)
        assert cache.get_seq_length() == 136
        assert cache.tokens.tokens.blocks[0]
        again = model(ids[:, 136:], past_key_values=cache).logits
        assert_close(again, first[:, 136:], tolerance=PACKED_8)
        assert_close(model(ids[:, :1], past_key_values=cache).logits, more, tolerance=PACKED_8)


def test_a_cache_is_packed_only_where_the_model_was_loaded_so(base: Path) -> None:
    path = module_checkpoint(base, "stablelm-head64")
    model, _ = qoff.load(path, kv=None)
    packing, _ = qoff.load(path, kv=8)
    with model, packing:
        with pytest.raises(ArgumentError, match="load it with kv=8"):
            qoff.QoffCache(model, kv=8)
        for one, other in ((model, packing), (packing, model)):
            with pytest.raises(OpError, match="needs a cache of its own"):
                one(torch.tensor([[3]]), past_key_values=qoff.QoffCache(other))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("bloom", "layer 0 does not use transformers' attention interface"),
        ("mamba2", "it has no attention"),
        ("minicpm3", "its queries, keys and values differ in shape"),
        ("falcon_h1", "FalconH1Attention has no layer of the cache for itself"),
        ("stablelm", "heads of 16 channels"),
    ],
)
def test_what_cannot_be_packed_is_refused(base: Path, name: str, reason: str) -> None:
    with pytest.raises(QoffError, match=reason) as refusal:
        qoff.load(module_checkpoint(base, name), kv=4)
    assert "\n" not in str(refusal.value)


def test_what_names_another_way_names_one_that_there_is(base: Path, tmp_path: Path) -> None:
    path = module_checkpoint(base, "gpt2")
    model, _ = qoff.load(path)
    with model:
        assert model.name_or_path == str(path)
        for refused in (
            lambda: model(torch.tensor([[3]]), output_hidden_states=True),
            model.get_input_embeddings,
        ):
            with pytest.raises(OpError, match=rf"from_pretrained\('{path}'\)"):
                refused()
    found = AutoModelForCausalLM.from_pretrained(path)
    assert len(found(torch.tensor([[3]]), output_hidden_states=True).hidden_states) == 4


def test_a_table_of_positions_ends_with_a_message(base: Path) -> None:
    model, _ = qoff.load(module_checkpoint(base, "gpt2"), kv=None)
    with model:
        limit = model.config.max_position_embeddings
        cache = qoff.QoffCache(model)
        ids = torch.full((1, limit), 3)
        model(ids, past_key_values=cache, logits_to_keep=1)
        before = model.stats().disk_bytes
        for more, where in ((ids[:, :1], cache), (torch.full((1, limit + 1), 3), None)):
            with pytest.raises(ArgumentError, match=f"is run up to {limit} tokens a sequence"):
                model(more, past_key_values=where)
        assert model.stats().disk_bytes == before
    other, _ = qoff.load(module_checkpoint(base, "stablelm"), kv=None)
    with other:  # whose positions are angles
        other(torch.full((1, other.config.max_position_embeddings + 1), 3), logits_to_keep=1)


def test_a_model_without_attention_says_so(base: Path) -> None:
    model, _ = qoff.load(module_checkpoint(base, "mamba2"))
    with model:
        assert "cannot be packed: it has no attention;" in repr(model)


def test_new_tokens_may_be_multiplied_by_the_mask(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODULES, "mamba", {"model_type": "mamba", "state_size": 8})
    path = module_checkpoint(base, "mamba")
    reference = module_reference(base, "mamba")
    model, tokenizer = qoff.load(path)
    options: dict[str, Any] = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    with model:
        inputs = tokenizer(PROMPTS, return_tensors="pt", padding=True)
        inputs.pop("token_type_ids", None)
        wanted = reference.generate(**inputs, **options)
        assert torch.equal(model.generate(**inputs, **options), wanted)
    with qoff.LLM(path, device="cpu") as llm:
        params = qoff.SamplingParams(temperature=0, max_tokens=6, min_tokens=6)
        found = [list(one.token_ids) for one in llm.generate(PROMPTS, params)]
        assert found == wanted[:, -6:].tolist()


LATENT: dict[str, Any] = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
# Where layers are, and how wide theirs are, in ways of their own.
UNUSUAL: dict[str, dict[str, Any]] = {
    "modernbert-decoder": {"sliding_window": 6, "cls_token_id": 1, "sep_token_id": 2},
    "longcat_flash": {
        **LATENT,
        "num_layers": 2,
        "ffn_hidden_size": 96,
        "expert_ffn_hidden_size": 32,
        "n_routed_experts": 4,
        "zero_expert_num": 2,
        "moe_topk": 2,
        "head_dim": 16,
    },
    "gemma4_unified_text": {
        "head_dim": 16,
        "global_head_dim": 32,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_layers_are_found_where_they_are_and_streamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    layers = {} if name == "longcat_flash" else {"num_hidden_layers": 4}
    monkeypatch.setitem(MODULES, name, {"model_type": name, **layers, **UNUSUAL[name]})
    path, reference = module_checkpoint(tmp_path, name), module_reference(tmp_path, name)
    least, _ = load_budgets(path, kv=None)
    model, _ = qoff.load(path, device_memory=least, kv=None)
    with model:
        ids = torch.randint(3, 99, (1, 9))
        options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
        assert torch.equal(model.generate(ids, **options), reference.generate(ids, **options))


def test_attention_may_get_its_mask_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {"model_type": "afmoe", **HEADS_OF_64, "num_experts": 4, "num_experts_per_tok": 2}
    own |= {"num_dense_layers": 1, "moe_intermediate_size": 32, "sliding_window": 90}
    monkeypatch.setitem(MODULES, "afmoe", own)
    path, reference = module_checkpoint(tmp_path, "afmoe"), module_reference(tmp_path, "afmoe")
    model, _ = qoff.load(path, kv=KVQuant(16, 16))
    with model:
        decoder: Any = model.runtime.decoder
        assert len(decoder.packed_shapes) == 3
        ids = torch.randint(3, 99, (1, 100))
        options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
        assert torch.equal(model.generate(ids, **options), reference.generate(ids, **options))
