"""Bodies of requests: what is accepted without effect, and how much there may be of it."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from openai import OpenAI
from pydantic import ValidationError

from qoff.api.body import Body, wrong_body
from qoff.api.protocol import (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    TokenizeRequest,
)
from qoff.engine import SamplingParams

from .conftest import MODEL, Running

CHAT: Any = [{"role": "user", "content": "Hi"}]
CALL = {"id": "", "function": {"name": "", "arguments": ""}}
TOOL = {"type": "function", "function": {"name": "a"}}
PART = {"type": "text", "text": ""}


def test_fields_that_say_the_default_are_accepted(client: OpenAI) -> None:
    options: Any = {"temperature": 0, "max_tokens": 6}
    (plain,) = client.chat.completions.create(model=MODEL, messages=CHAT, **options).choices
    chunks = client.chat.completions.create(
        model=MODEL, messages=CHAT, modalities=["text"], prompt_cache_key="a", stream=True,
        safety_identifier="b", seed=-1, **options,
        stream_options={"include_usage": True, "include_obfuscation": False},
    )  # fmt: skip
    found = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(found) == plain.message.content
    options |= {"model": MODEL, "prompt": "abc"}
    wanted = client.completions.create(**options).choices
    assert client.completions.create(suffix="", best_of=1, **options).choices == wanted
    assert len(client.completions.create(n=2, best_of=2, **options).choices) == 2


@pytest.mark.parametrize(
    "more",
    [{"best_of": 2}, {"n": 2, "best_of": 3}, {"suffix": "a"}, {"seed": -(2**63) - 1}],
)
def test_fields_that_say_more_are_refused(more: Any) -> None:
    with pytest.raises(ValidationError):
        CompletionRequest.model_validate({"prompt": "a", **more})


@pytest.mark.parametrize(
    ("body", "fields", "message"),
    [
        (CompletionRequest, {"prompt": "a", "echo": True, "stream": True},
         "echo does not go with stream"),
        (ChatRequest,
         {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
         "parts of type 'image_url' are not supported, only text (in messages.0.content)"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_without_the_validators_words(
    body: type[Body], fields: Any, message: str
) -> None:
    with pytest.raises(ValidationError) as raised:
        body.model_validate_json(json.dumps(fields))
    assert wrong_body(raised.value).message == message


def test_a_seed_below_zero_is_one_of_its_own() -> None:
    seeds = [
        CompletionRequest(prompt="a", seed=seed).sampling(SamplingParams()).seed
        for seed in (-(2**63), -2, -1, 0, 1)
    ]
    assert seeds == [0, 2**63 - 2, 2**63 - 1, 0, 1]


def test_a_call_without_arguments_has_none(served: Running) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": ""}}
    messages = [*CHAT, {"role": "assistant", "content": None, "tool_calls": [call]}]
    _, found, _ = served.ask("/tokenize", {"messages": messages})
    text = served.ask("/detokenize", {"tokens": found["tokens"]})[1]["prompt"]
    assert '"arguments": {}' in text


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": "x" * 300}]}, "messages"),
        ("completions", {"prompt": "x" * 300, "stream": True}, "prompt"),
        ("completions", {"prompt": "x" * 90_000}, "prompt"),
        ("embeddings", {"input": ["a", "x" * 300]}, "input"),
    ],
)
def test_a_prompt_longer_than_the_context_has_the_code_of_that(
    served: Running, path: str, body: Any, param: str
) -> None:
    status, found, _ = served.ask(f"/v1/{path}", body)
    error = found["error"]
    assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", param)


def test_a_prompt_is_echoed_without_an_answer(client: OpenAI) -> None:
    options: Any = {"model": MODEL, "prompt": ["abc", "Hello"], "logprobs": 1, "echo": True}
    found = client.completions.create(max_tokens=0, **options)
    wanted = client.completions.create(max_tokens=1, **options)
    for one, more, prompt in zip(found.choices, wanted.choices, options["prompt"], strict=True):
        assert (one.text, one.finish_reason) == (prompt, "length")
        assert one.logprobs is not None
        assert more.logprobs is not None
        assert one.logprobs.tokens == (more.logprobs.tokens or ())[:-1]
        assert one.logprobs.text_offset == (more.logprobs.text_offset or ())[:-1]
    assert found.usage is not None
    assert found.usage.completion_tokens == 0


@pytest.mark.parametrize(
    ("kind", "make", "most"),
    [
        (CompletionRequest, lambda n: {"prompt": ["a"] * n}, 4096),
        (CompletionRequest, lambda n: {"prompt": [[1]] * n}, 4096),
        (EmbeddingRequest, lambda n: {"input": ["a"] * n}, 4096),
        (EmbeddingRequest, lambda n: {"input": [[1]] * n}, 4096),
        (ChatRequest, lambda n: {"messages": CHAT * n}, 16_384),
        (TokenizeRequest, lambda n: {"messages": CHAT * n}, 16_384),
        (ChatRequest, lambda n: {"messages": [{"role": "a", "tool_calls": [CALL] * n}]}, 512),
        (ChatRequest, lambda n: {"messages": [{"role": "a", "content": [PART] * n}]}, 4096),
        (ChatRequest, lambda n: {"messages": CHAT, "tools": [TOOL] * n}, 512),
    ],
)
def test_lists_have_bounds(kind: type[Body], make: Any, most: int) -> None:
    kind.model_validate(make(most))
    with pytest.raises(ValidationError) as found:
        kind.model_validate(make(most + 1))
    assert f"at most {most} items" in wrong_body(found.value).message


def test_a_prompt_may_have_many_tokens() -> None:
    CompletionRequest.model_validate({"prompt": [1] * 100_000})


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "", "tool_calls": [CALL] * 500}] * 80},
        {"messages": CHAT, "chat_template_kwargs": {"a": [[]] * 70_000}},
        {"messages": CHAT, "tools": [TOOL | {"x": [{'\\"': "["}] * 70_000}]},
    ],
)
def test_all_lists_and_objects_together_have_a_bound(body: Any) -> None:
    with pytest.raises(ValidationError) as found:
        ChatRequest.model_validate_json(json.dumps(body))
    assert "more than 65536 objects and lists" in wrong_body(found.value).message


@pytest.mark.parametrize(
    "more",
    [
        {f"k{i}": 1 for i in range(140_000)},
        {"chat_template_kwargs": {f'{i}"': "a:b" for i in range(140_000)}},
    ],
    ids=["flat", "nested"],
)
def test_all_fields_together_have_a_bound(more: Any) -> None:
    with pytest.raises(ValidationError) as found:
        ChatRequest.model_validate_json(json.dumps({"messages": CHAT, **more}))
    assert wrong_body(found.value).message == "more than 131072 fields"


@pytest.mark.parametrize(
    "text", ["[{" * 40_000, ":" * 140_000, '"[' * 70_000, "\\{" * 70_000, '\\"{' * 70_000]
)
def test_signs_in_a_text_do_not_count(text: str) -> None:
    body = {"messages": [{"role": "user", "content": text}]}
    ChatRequest.model_validate_json(json.dumps(body))


def test_a_body_of_a_million_lists_is_refused_at_once() -> None:
    body = b'{"prompt": [%s]}' % b",".join([b"[1]"] * (1 << 20))
    start = time.perf_counter()
    with pytest.raises(ValidationError):
        CompletionRequest.model_validate_json(body)
    assert time.perf_counter() - start < 1


@pytest.mark.parametrize("path", ["/", "/health", "/metrics", "/v1/models", "/v1/batches"])
def test_what_can_be_had_can_be_asked_about(served: Running, path: str) -> None:
    """By HEAD, as those do who watch servers."""
    status, text, headers = served.ask(path, method="HEAD")
    assert (status, text) == (200, "")
    assert headers.get("content-type") == served.ask(path)[2].get("content-type")
