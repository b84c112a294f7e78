"""What transformers, torch and PEFT do with any model: done here, or refused in one line."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import pipeline

import qoff
from qoff.checkpoint import Checkpoint
from qoff.errors import QoffError
from tests.tiny_models import load_budgets, reference_model, tiny_checkpoint

IDS = torch.tensor([[5, 6, 7, 8]])


def adapted(model: Any) -> object:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))


REFUSED: dict[str, tuple[Callable[[Any], object], str]] = {
    "to a GPU": (lambda m: m.to("cuda"), r"load it with qoff\.load\(\.\.\., device='cuda'\)"),
    "cuda": (lambda m: m.cuda(), "cannot be moved to cuda"),
    "half": (lambda m: m.half(), "cannot be cast to torch.float16"),
    "bfloat16": (lambda m: m.bfloat16(), "dtype='bfloat16'"),
    "double": (lambda m: m.to(torch.float64), "cannot be cast to torch.float64"),
    "pickle": (pickle.dumps, "cannot be pickled or copied; load it again from"),
    "deepcopy": (copy.deepcopy, "cannot be pickled or copied"),
    "save_pretrained": (lambda m: m.save_pretrained("here"), "copy it"),
    "peft": (adapted, r"use AutoModelForCausalLM\.from_pretrained"),
    "add_adapter": (lambda m: m.add_adapter(None), r"use AutoModelForCausalLM\.from_pretrained"),
    "embeddings": (lambda m: m.get_input_embeddings(), "has no modules of torch"),
    "more tokens": (lambda m: m.resize_token_embeddings(9), "has no modules of torch"),
    "checkpointing": (lambda m: m.gradient_checkpointing_enable(), "has no modules of torch"),
    "hidden states": (lambda m: m(IDS, output_hidden_states=True), "output_hidden_states=True;"),
    "early exit": (lambda m: m.generate(IDS, assistant_early_exit=1), "give an assistant_model"),
    "multi-token prediction": (lambda m: m.generate(IDS, use_mtp=True), "draft_model='mtp'"),
    "as a draft model": (lambda m: m.generate(IDS, is_assistant=True), "as assistant_model"),
    "attentions": (lambda m: m.generate(IDS, output_attentions=True), "output_attentions=True;"),
}


@pytest.mark.parametrize(("work", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_done_is_refused_in_one_line(
    work: Callable[[Any], object], message: str, model: Any
) -> None:
    with pytest.raises(QoffError, match=message) as refusal:
        work(model)
    assert "\n" not in str(refusal.value)


def test_what_a_config_asks_for_is_refused(model: Any) -> None:
    model.config.output_hidden_states = True
    try:
        with pytest.raises(QoffError, match="output_hidden_states=True"):
            model(IDS)
    finally:
        model.config.output_hidden_states = False


def test_moving_to_where_it_is_does_nothing(model: Any) -> None:
    for same in (model.to("cpu"), model.cpu(), model.float(), model.to(torch.float32)):
        assert same is model


def test_compiled_it_computes_the_same_at_once(model: Any) -> None:
    compiled = torch.compile(model)
    torch._dynamo.reset()
    assert torch.equal(compiled(IDS).logits, model(IDS).logits)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 1
    run = {"max_new_tokens": 4, "do_sample": False}
    assert torch.equal(compiled.generate(IDS, **run), model.generate(IDS, **run))


def test_padding_on_the_right_gives_the_same_answers(model: Any, tokenizer: Any) -> None:
    found = {}
    for side in ("left", "right"):
        inputs = tokenizer(["abc d", "x"], return_tensors="pt", padding=True, padding_side=side)
        assert bool(inputs.attention_mask[1, 0]) == (side == "right")
        out = model.generate(**inputs, max_new_tokens=6, min_new_tokens=6, do_sample=False)
        found[side] = out[:, -6:]
    assert torch.equal(found["left"], found["right"])


@pytest.mark.parametrize("family", ["llama", "qwen3-tied"])
def test_a_streamed_model_tells_where_its_weights_are(
    tmp_path_factory: pytest.TempPathFactory, family: str
) -> None:
    path = tiny_checkpoint(tmp_path_factory.getbasetemp(), family)
    least, _ = load_budgets(path)
    resident, tokenizer = qoff.load(path)
    streamed, _ = qoff.load(path, device_memory=least)
    with resident, streamed:
        files = Checkpoint.open(path)
        stored = sum(e.nbytes for f in files.files for e in f.weights.values())
        if not torch.accelerator.is_available():  # else a pipeline would move it there
            assert not hasattr(resident, "hf_device_map")
            run = pipeline("text-generation", model=resident, tokenizer=tokenizer, device="cpu")
            assert run("abc", max_new_tokens=3)
        assert resident.get_memory_footprint() >= stored > streamed.get_memory_footprint()
        assert {"model.layers.0", "lm_head"} <= set(streamed.hf_device_map)
        assert set(streamed.hf_device_map.values()) == {"cpu", "disk"}
        shapes = sum(p.numel() for p in reference_model(path).parameters())
        for model in (resident, streamed):
            assert model.num_parameters() == shapes
            assert model.num_parameters(only_trainable=True) == 0
            assert str(path) in repr(model)
        assert "modules stream" in repr(streamed)
        run = pipeline("text-generation", model=streamed, tokenizer=tokenizer)
        assert run("abc", max_new_tokens=3)
    in_host, _ = qoff.load(path, device_memory=least, host_memory="1MiB")
    with in_host:
        assert set(in_host.hf_device_map.values()) == {"cpu"}


def test_the_cache_is_packed_where_it_can_be(tmp_path_factory: pytest.TempPathFactory) -> None:
    base = tmp_path_factory.getbasetemp()
    for family, described in (("llama-head64", "packed, 4-bit K"), ("llama", "float32 (heads of")):
        for memory in (None, "8MiB"):
            model, _ = qoff.load(tiny_checkpoint(base, family), device_memory=memory)
            with model:
                assert f"KV cache: {described}" in repr(model)
    model, _ = qoff.load(tiny_checkpoint(base, "llama-head64"), kv="none")
    with model:
        assert "KV cache: float32\n" in repr(model)
