"""The loop of `generate` gives what transformers' own loop gives on the same model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import GenerationMixin, LogitsProcessor, LogitsProcessorList
from transformers.generation.streamers import BaseStreamer

import qoff
from qoff.hf.decoding import Rows, TokenChoice
from qoff.models.native import following
from tests.tiny_models import load_budgets

NEW = 10
PROMPTS = ["Hello", "a much longer prompt, of 40 characters..", "?"]


class Tokens(BaseStreamer):
    """What a streamer is given."""

    def __init__(self) -> None:
        self.found: list[list[int]] = []

    def put(self, value: torch.Tensor) -> None:
        self.found.append(value.flatten().tolist())

    def end(self) -> None:
        self.found.append([])


@contextmanager
def transformers_loop(model: Any) -> Iterator[list[int]]:
    """A hook on `forward` wants every pass to be one; yields the tokens of each."""
    widths: list[int] = []

    def count(_: Any, __: Any, options: dict[str, Any], ___: Any) -> None:
        widths.append(options["input_ids"].shape[1])

    handle = model.register_forward_hook(count, with_kwargs=True)
    try:
        yield widths
    finally:
        handle.remove()


@pytest.fixture
def own_loop(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Forbid transformers' loop."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("transformers' own loop")

    return lambda: monkeypatch.setattr(GenerationMixin, "_sample", refuse)


def run(model: Any, tokenizer: Any, prompts: Any, **options: Any) -> torch.Tensor:
    inputs = tokenizer(prompts, return_tensors="pt", padding=True)
    torch.manual_seed(4)
    found: torch.Tensor = model.generate(
        **inputs, **{"max_new_tokens": NEW, "do_sample": True, **options}
    )
    return found


OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "penalized": {"do_sample": False, "repetition_penalty": 1.3, "min_new_tokens": 4},
    "sampling": {"top_k": 0},
    "warped": {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "penalized-and-warped": {"repetition_penalty": 1.3, "temperature": 0.7, "top_p": 0.9},
    "another-warper": {"temperature": 2.0, "typical_p": 0.8, "top_k": 30},
    "longer-than-the-model": {"do_sample": False, "max_new_tokens": 60, "max_time": 1e9},
    "ends": {"eos_token_id": list(range(0, 200, 3)), "pad_token_id": 1, "max_new_tokens": 30},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS], ids=["one", "batch"])
def test_tokens_are_those_of_transformers_loop(
    options: dict[str, Any], prompts: list[str], model: Any, tokenizer: Any, own_loop: Any
) -> None:
    found, streams = [], [Tokens(), Tokens()]
    more = [{"streamer": one} if len(prompts) == 1 else {} for one in streams]
    with transformers_loop(model) as widths:
        wanted = run(model, tokenizer, prompts, **options, **more[0])
    assert (
        len(widths)
        == wanted.shape[1]
        - tokenizer(prompts, padding=True, return_tensors="pt")["input_ids"].shape[1]
    )
    own_loop()
    found = run(model, tokenizer, prompts, **options, **more[1])
    assert torch.equal(found, wanted)
    assert streams[0].found == streams[1].found


@pytest.mark.parametrize("name", ["greedy", "warped"])
def test_steps_are_done_together_where_nobody_looks_at_each(
    name: str, model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "HEARD_S", 1e9)
    at_once: list[int] = []
    together = model.runtime.tokens

    def counted(*given: Any) -> Any:
        found = together(*given)
        at_once.append(len(found))
        return found

    monkeypatch.setattr(model.runtime, "tokens", counted)
    run(model, tokenizer, PROMPTS, **OPTIONS[name], eos_token_id=None)
    assert max(at_once) > 5
    at_once.clear()
    run(model, tokenizer, PROMPTS, **OPTIONS[name], max_time=1e9)
    assert not at_once


def test_random_numbers_go_on_as_after_transformers_loop(
    model: Any, tokenizer: Any, own_loop: Any
) -> None:
    with transformers_loop(model):
        run(model, tokenizer, PROMPTS)
    wanted = torch.rand(3)
    own_loop()
    run(model, tokenizer, PROMPTS)
    assert torch.equal(torch.rand(3), wanted)


def test_the_cache_goes_on_after_it(model: Any, tokenizer: Any, own_loop: Any) -> None:
    own_loop()
    cache = qoff.QoffCache(model)
    first = run(model, tokenizer, PROMPTS[:1], do_sample=False, past_key_values=cache)
    assert cache.columns == first.shape[1] - 1
    options: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False}
    wanted = model.generate(first, **options)
    assert torch.equal(model.generate(first, past_key_values=cache, **options), wanted)


def test_a_processor_of_ones_own_is_called_for_each_token(
    model: Any, tokenizer: Any, own_loop: Any
) -> None:
    own_loop()
    lengths: list[int] = []

    class Always(LogitsProcessor):
        def __call__(self, input_ids: Any, scores: Any) -> Any:
            lengths.append(input_ids.shape[1])
            assert input_ids.is_contiguous()
            return torch.full_like(scores, -torch.inf).index_fill_(1, torch.tensor([7]), 0)

    for sampled in (False, True):
        lengths.clear()
        found = run(
            model, tokenizer, PROMPTS, do_sample=sampled, logits_processor=[Always()],
            eos_token_id=None,
        )  # fmt: skip
        assert found[:, -NEW:].eq(7).all()
        assert lengths == list(range(found.shape[1] - NEW, found.shape[1]))


def test_scores_that_leave_no_token_are_torchs_error(model: Any, tokenizer: Any) -> None:
    class Nothing(LogitsProcessor):
        def __call__(self, input_ids: Any, scores: Any) -> Any:
            return torch.full_like(scores, -torch.inf)

    with pytest.raises(RuntimeError, match="probability tensor"):
        run(model, tokenizer, PROMPTS, logits_processor=[Nothing()])


def test_a_bounded_model_makes_room_as_it_goes_on(
    model: Any, tokenizer: Any, checkpoint: Any, own_loop: Any
) -> None:
    own_loop()
    room = {"context": 80, "batch_size": 3}
    least, _ = load_budgets(checkpoint, **room)
    bounded, _ = qoff.load(checkpoint, device_memory=least, **room)
    with bounded:
        found = run(bounded, tokenizer, PROMPTS, do_sample=False)
    assert torch.equal(found, run(model, tokenizer, PROMPTS, do_sample=False))


def test_warpers_in_another_order_are_called() -> None:
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    hot, few, likely = TemperatureLogitsWarper(0.5), TopKLogitsWarper(3), TopPLogitsWarper(0.5)
    several = TopKLogitsWarper(3, min_tokens_to_keep=2)
    for processors, called in (
        ([hot, few, likely], 0),
        ([likely, hot, few], 1),
        ([hot, hot], 1),
        ([hot, several], 2),
        ([hot, several, likely], 2),
    ):
        choice = TokenChoice(LogitsProcessorList(processors), True)
        assert list(choice.before) == processors[:called]


def test_ids_have_room_for_more_than_was_known() -> None:
    rows = Rows.of(torch.tensor([[1], [2]]), float("inf"))
    for token in range(600):
        rows.append(torch.tensor([[token, -token]]))
    assert rows.ids[:, 1:].tolist() == [[*range(600)], [-i for i in range(600)]]
