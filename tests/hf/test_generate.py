"""`generate` of a qoff model gives what transformers gives on the dequantized weights."""

from __future__ import annotations

import copy
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    GenerationConfig,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
    TextStreamer,
    pipeline,
)

import qoff
from qoff.errors import OpError, QoffError
from tests.tiny_families import EOS
from tests.tiny_models import load_budgets

NEW = 12
PROMPTS = ["Hello", "a much longer prompt, of 40 characters..", "?"]


def generate(model: Any, tokenizer: Any, prompts: str | list[str], **options: Any) -> torch.Tensor:
    inputs = tokenizer(prompts, return_tensors="pt", padding=True)
    options = {"max_new_tokens": NEW, "do_sample": False, **options}
    return model.generate(**inputs, **options)


def test_greedy_is_the_argmax_of_every_step(model: Any, tokenizer: Any) -> None:
    ids = tokenizer(PROMPTS[0], return_tensors="pt").input_ids
    wanted = ids
    for _ in range(NEW):
        token = model(wanted).logits[:, -1].argmax(-1, keepdim=True)
        wanted = torch.cat([wanted, token], 1)
        if token == EOS:
            break
    assert torch.equal(model.generate(ids, max_new_tokens=NEW, do_sample=False), wanted)


GREEDY: dict[str, dict[str, Any]] = {
    "greedy": {},
    "penalty": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
    "beams": {"num_beams": 3},
    "beams-returned": {"num_beams": 4, "num_return_sequences": 3, "length_penalty": 0.5},
    "no-cache": {"use_cache": False, "max_new_tokens": 4},
}


@pytest.mark.parametrize("options", GREEDY.values(), ids=GREEDY)
@pytest.mark.parametrize("prompts", [PROMPTS[1], PROMPTS], ids=["one", "batch"])
def test_tokens_are_those_of_transformers(
    options: dict[str, Any], prompts: Any, model: Any, tokenizer: Any, reference: Any
) -> None:
    found = generate(model, tokenizer, prompts, **options)
    assert torch.equal(found, generate(reference, tokenizer, prompts, **options))


@pytest.mark.parametrize("kind", ["lookup", "assisted", "chunks", "copied-cache"])
def test_other_ways_to_the_same_tokens(kind: str, model: Any, tokenizer: Any) -> None:
    prompt = "hello hello hello hello"
    options: dict[str, Any] = {
        "lookup": {"prompt_lookup_num_tokens": 3},
        "assisted": {"assistant_model": model},
        "chunks": {"prefill_chunk_size": 5},
        "copied-cache": {},
    }[kind]
    if kind == "copied-cache":  # a prompt that is read once and gone on from many times
        read = model(tokenizer(prompt[:-3], return_tensors="pt").input_ids).past_key_values
        options = {"past_key_values": copy.deepcopy(read)}
    wanted = generate(model, tokenizer, prompt)
    assert torch.equal(generate(model, tokenizer, prompt, **options), wanted)


def test_chunks_of_padding_alone_are_refused_as_such(model: Any, tokenizer: Any) -> None:
    with pytest.raises(OpError, match="leave out prefill_chunk_size"):
        generate(model, tokenizer, PROMPTS, prefill_chunk_size=5)


def test_threads_that_generate_leave_torch_as_it_was(model: Any, tokenizer: Any) -> None:
    before = torch.get_num_threads()
    found: list[torch.Tensor] = []
    seen: list[int] = []

    def work() -> None:
        found.append(generate(model, tokenizer, PROMPTS))

    for targets in ([work] * 4, [lambda: seen.append(torch.get_num_threads())]):
        threads = [threading.Thread(target=target) for target in targets]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(torch.equal(tokens, found[0]) for tokens in found)
    assert seen == [before] == [torch.get_num_threads()]


def test_streaming_from_disk_gives_the_same_tokens(
    model: Any, tokenizer: Any, checkpoint: Path
) -> None:
    room = {"context": 64, "batch_size": 9}  # three prompts, three beams
    least, everything = load_budgets(checkpoint, **room)
    for memory in (least, f"{(least + everything) // 2}"):
        streaming, _ = qoff.load(checkpoint, device_memory=memory, **room)
        with streaming.runtime:
            for options in ({}, {"num_beams": 3}):
                found = generate(streaming, tokenizer, PROMPTS, **options)
                assert torch.equal(found, generate(model, tokenizer, PROMPTS, **options))
            assert streaming.stats().slot_bytes > 0


def test_sampling_is_reproducible_and_that_of_transformers(
    model: Any, tokenizer: Any, reference: Any
) -> None:
    options = {"do_sample": True, "temperature": 1.5, "top_k": 20, "top_p": 0.9}
    found = []
    for used, seed in ((model, 1), (model, 1), (reference, 1), (model, 2)):
        torch.manual_seed(seed)
        found.append(generate(used, tokenizer, PROMPTS, **options))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert found[0].shape != found[3].shape or not torch.equal(found[0], found[3])


def test_several_samples_of_one_prompt(model: Any, tokenizer: Any, reference: Any) -> None:
    found = []
    for used in (model, reference):
        torch.manual_seed(3)
        found.append(generate(used, tokenizer, PROMPTS[1], do_sample=True, num_return_sequences=3))
    assert torch.equal(*found)
    assert len({tuple(row) for row in found[0].tolist()}) > 1


def test_a_padded_batch_gives_what_each_prompt_gives_alone(model: Any, tokenizer: Any) -> None:
    together = generate(model, tokenizer, PROMPTS)
    for prompt, row in zip(PROMPTS, together, strict=True):
        alone = generate(model, tokenizer, prompt)[0]
        new = alone[tokenizer(prompt, return_tensors="pt").input_ids.shape[1] :]
        assert torch.equal(row[-NEW:][: len(new)], new)


def test_text_is_streamed_as_it_comes(model: Any, tokenizer: Any, capsys: Any) -> None:
    wanted = generate(model, tokenizer, PROMPTS[0])
    text = tokenizer.decode(wanted[0, len(PROMPTS[0]) :], skip_special_tokens=True)
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    generate(model, tokenizer, PROMPTS[0], streamer=streamer)
    assert capsys.readouterr().out == text + "\n"
    pieces = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60, skip_special_tokens=True)
    thread = threading.Thread(
        target=generate, args=(model, tokenizer, PROMPTS[0]), kwargs={"streamer": pieces}
    )
    thread.start()
    assert "".join(pieces) == text
    thread.join()


def test_stopping_criteria_end_the_text(model: Any, tokenizer: Any) -> None:
    whole = generate(model, tokenizer, PROMPTS[0])[0]
    prompt = len(tokenizer(PROMPTS[0]).input_ids)

    class AfterFive(StoppingCriteria):
        def __call__(self, ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            return torch.full((len(ids),), ids.shape[1] == prompt + 5)

    stopped = generate(
        model, tokenizer, PROMPTS[0], stopping_criteria=StoppingCriteriaList([AfterFive()])
    )
    assert torch.equal(stopped[0], whole[: prompt + 5])
    third = int(whole[prompt + 2])
    ended = generate(model, tokenizer, PROMPTS[0], eos_token_id=third)[0]
    assert int(ended[-1]) == third
    assert third not in ended[prompt:-1]
    word = tokenizer.decode([third])
    inputs = tokenizer(PROMPTS[0], return_tensors="pt")
    options = {"max_new_tokens": NEW, "do_sample": False, "tokenizer": tokenizer}
    ended = model.generate(**inputs, stop_strings=[word], **options)[0]
    assert int(ended[-1]) == third


def test_scores_and_the_cache_are_returned(model: Any, tokenizer: Any, reference: Any) -> None:
    options = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    found = generate(model, tokenizer, PROMPTS, **options)
    wanted = generate(reference, tokenizer, PROMPTS, **options)
    assert len(found.scores) == len(wanted.scores)
    for ours, theirs in zip(found.logits, wanted.logits, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-3)
    columns = found.past_key_values.get_seq_length()
    assert columns == wanted.past_key_values.get_seq_length()


def test_a_chat_goes_on_from_its_cache(model: Any, tokenizer: Any) -> None:
    """The second turn on the first turn's cache is the second turn on the whole text."""
    first = generate(model, tokenizer, PROMPTS[0], return_dict_in_generate=True)
    more = tokenizer(" and then?", return_tensors="pt", add_special_tokens=False).input_ids
    whole = torch.cat([first.sequences, more], 1)
    for cropped in (0, 4):
        cache = first.past_key_values
        cache.crop(-cropped)
        kept = cache.get_seq_length()
        again = model.generate(
            whole,
            attention_mask=torch.ones_like(whole),
            past_key_values=cache,
            max_new_tokens=NEW,
            do_sample=False,
        )
        fresh = model.generate(
            whole, attention_mask=torch.ones_like(whole), max_new_tokens=NEW, do_sample=False
        )
        assert torch.equal(again, fresh)
        cache.crop(kept - cache.get_seq_length())  # back to the first turn
        assert cache.get_seq_length() == kept


def test_the_pipeline_takes_model_and_tokenizer(
    model: Any, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    chat = [{"role": "user", "content": "Hi"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    wanted = generate(model, tokenizer, prompt)[0, len(tokenizer(prompt).input_ids) :]
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
        options = {
            "generation_config": GenerationConfig(
                max_new_tokens=NEW, do_sample=False, pad_token_id=0
            )
        }
        (answer,) = pipe(chat, **options)
        batch = pipe(PROMPTS, batch_size=2, return_full_text=False, **options)
    finally:
        logger.removeHandler(caplog.handler)
    assert answer["generated_text"][-1] == {
        "role": "assistant",
        "content": tokenizer.decode(wanted, skip_special_tokens=True),
    }
    assert len(batch) == len(PROMPTS)
    assert not [r for r in caplog.records if "not supported" in r.getMessage()]


def test_healed_tokens_are_those_of_transformers(
    model: Any, tokenizer: Any, reference: Any
) -> None:
    def healed(by: Any, prompts: list[str]) -> torch.Tensor:
        inputs = tokenizer(prompts, return_tensors="pt", padding=True)
        options = {"token_healing": True, "tokenizer": tokenizer, "do_sample": False}
        found: torch.Tensor = by.generate(**inputs, **options, max_new_tokens=NEW)
        return found

    assert torch.equal(healed(model, PROMPTS), healed(reference, PROMPTS))
    with pytest.raises(OpError, match=r"\[1, 5\] tokens of \[1, 7\]: it takes prompts without spe"):
        healed(model, [" Hello "])


def test_the_defaults_of_the_model_are_kept(model: Any, checkpoint: Path) -> None:
    stored = GenerationConfig.from_pretrained(checkpoint)
    assert model.generation_config.eos_token_id == stored.eos_token_id == EOS


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_end_a_generation(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, bad: float
) -> None:
    model, _ = qoff.load(checkpoint)
    with model:
        forward = model.runtime.forward

        def broken(run: Any) -> torch.Tensor:
            logits = forward(run)
            logits[-1, 7] = bad
            return logits

        monkeypatch.setattr(model.runtime, "forward", broken)
        with pytest.raises(QoffError, match=r"logits are not finite .*qoff verify"):
            model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3)
