"""`device_memory` bounds everything: weights, KV caches and what a pass allocates, counted."""

from __future__ import annotations

import copy
import pickle
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import qoff
from qoff.checkpoint import Checkpoint
from qoff.errors import BudgetError
from qoff.hf.budget import Budget
from qoff.kvcache import KVQuant
from qoff.models.convert.convert import convert
from tests.instruments import allocated
from tests.tiny_models import (
    QUANT,
    load_budgets,
    save_model,
    save_tokenizer,
    tiny_checkpoint,
)

RUN = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@pytest.mark.parametrize("kv", [None, 4, KVQuant(8, 4, 16, {1: (16, 16)})], ids=str)
@pytest.mark.parametrize("family", ["llama-head64", "gemma2", "mixtral", "gemma3n"])
def test_nothing_goes_beyond_the_bound(base: Path, family: str, kv: Any) -> None:
    path = tiny_checkpoint(base, family)
    if kv is not None and family != "llama-head64":
        pytest.skip("its heads cannot be packed")
    for batch, context, prompt in ((1, 640, 600), (3, 170, 150)):
        options = {"kv": kv, "context": context, "batch_size": batch}
        least, _ = load_budgets(path, **options)
        with pytest.raises(BudgetError, match=f"at least {least:,}"):
            qoff.load(path, device_memory=least - 1, **options)
        for memory in (least, 2 * least):
            model, _ = qoff.load(path, device_memory=memory, **options)
            ids = torch.randint(3, 120, (batch, prompt))
            with model:
                weights = model.get_memory_footprint()
                for beams in (1, 2) if batch == 1 and memory > least else (1,):
                    run = {**RUN, "max_new_tokens": context - prompt, "num_beams": beams}
                    peak = allocated(lambda m=model, i=ids, r=run: m.generate(i, **r))

                    assert weights + peak <= memory


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_logits_of_all_tokens_take_what_is_reserved_for_them(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocab, source, path = 4096, tmp_path / "floats", tmp_path / "packed"
    save_model(source, family, vocab_size=vocab)
    save_tokenizer(source, vocab)
    convert(source, path, quant=QUANT, for_cpu=True)
    reserved, own = [], Budget._pass
    monkeypatch.setattr(Budget, "_pass", lambda *a: reserved.append(own(*a)) or reserved[-1])
    model, _ = qoff.load(path, device_memory="40MiB", context=256)
    with model:
        for batch, length, padding in ((1, 200, 0), (3, 100, 0), (3, 100, 40)):
            ids = torch.randint(3, 120, (batch, length))
            mask = torch.ones_like(ids)
            mask[0, :padding] = 0
            for labels in ({}, {"labels": ids}):
                reserved.clear()
                peak = allocated(
                    lambda i=ids, m=mask, more=labels: model(i, attention_mask=m, **more)
                )
                with torch.inference_mode():
                    cache = model.runtime.new_cache(1).bytes_for(length + 1) * batch
                most = max(reserved) + cache
                assert peak <= most < peak + 4 * vocab * batch * length / 2


def test_a_refusal_says_what_takes_the_memory(checkpoint: Path) -> None:
    with pytest.raises(BudgetError, match=r"fewer or shorter sequences \(batch_size") as refusal:
        qoff.load(checkpoint, device_memory=0, batch_size=1000)
    found = re.search(r" and ([\d,]+) bytes of KV cache .* take ([\d,]+)", str(refusal.value))
    assert found is not None
    work, everything = (int(number.replace(",", "")) for number in found.groups())
    weights = sum(file.nbytes for file in Checkpoint.open(checkpoint).files)
    assert weights / 2 < everything - work < weights * 2


@pytest.mark.parametrize("kv", [None, 4], ids=str)
def test_a_prompt_that_failed_half_way_is_read_again_from_its_beginning(
    base: Path, kv: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, ids = tiny_checkpoint(base, "llama-head64"), torch.randint(3, 120, (1, 600))
    options = {"kv": kv, "context": 700}
    least, _ = load_budgets(path, **options)
    model, _ = qoff.load(path, device_memory=least, **options)
    with model:
        wanted = model(ids, logits_to_keep=1).logits
        cache, forward, calls = qoff.QoffCache(model), model.runtime.forward, []

        def failing(run: Any) -> Any:
            calls.append(run)
            if len(calls) == 2:
                raise KeyboardInterrupt
            return forward(run)

        monkeypatch.setattr(model.runtime, "forward", failing)
        with pytest.raises(KeyboardInterrupt):
            model(ids, past_key_values=cache, logits_to_keep=1)
        assert len(calls) == 2  # the prompt is read in pieces
        found = model(ids, past_key_values=cache, logits_to_keep=1).logits
        assert torch.equal(found, wanted)


def test_caches_count_from_when_they_are_made(base: Path) -> None:
    path = tiny_checkpoint(base, "llama-head64")
    least, _ = load_budgets(path, context=256)
    model, _ = qoff.load(path, device_memory=least, context=256)
    with model:
        cache = model(torch.randint(3, 120, (1, 200)), logits_to_keep=1).past_key_values
        with pytest.raises(BudgetError, match="KV cache"):
            _ = [copy.deepcopy(cache) for _ in range(100)]
        assert pickle.loads(pickle.dumps(cache)).columns == cache.columns


def test_calls_of_several_threads_wait_for_room(base: Path) -> None:
    path = tiny_checkpoint(base, "llama-head64")
    least, _ = load_budgets(path, context=256)
    model, _ = qoff.load(path, device_memory=least, context=256)
    ids, found = torch.randint(3, 120, (1, 100)), list[Any]()
    within = threading.Event()

    def generate(**more: Any) -> Any:
        return model.generate(ids, max_new_tokens=120, **RUN, **more)

    def fail(*_: Any) -> bool:
        within.set()
        with pytest.raises(BudgetError, match="of other caches"):
            generate()  # would wait for itself
        raise KeyboardInterrupt

    def others() -> None:
        within.wait()
        found.append(generate())

    threads = [threading.Thread(target=others, daemon=True) for _ in range(3)]
    with model:
        wanted = generate()
        for thread in threads:
            thread.start()
        with pytest.raises(KeyboardInterrupt) as kept:
            generate(stopping_criteria=[fail])
        for thread in threads:
            thread.join()
        assert kept.tb is not None  # which keeps the cache alive
        assert len(found) == len(threads)
        assert all(torch.equal(one, wanted) for one in found)
