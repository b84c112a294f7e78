"""Thinking between Cohere's marks, which documents have apart from what an answer says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from qoff.api.answers import Form
from qoff.api.messages import Message
from qoff.api.protocol import ChatRequest
from qoff.api.requests import Asked, asked
from qoff.api.thinking import MARKS, Thinking, parted
from qoff.engine import Completion, SamplingParams
from qoff.serve.engine import Engine, Piece
from qoff.serve.generation import Generated

from .test_tagged_calls import LOOK, TYPES, r7b

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"properties": TYPES}}}]
OTHERS = ["<|START_ACTION|>", "<|END_ACTION|>", "<|END_OF_TURN_TOKEN|>"]
THOUGHT = "<|START_THINKING|>Hm, é.\n<|END_THINKING|>"
RESPONSE = "<|START_RESPONSE|>Four < 5.<|END_RESPONSE|>"


@pytest.fixture(scope="module", params=[True, False], ids=["hidden", "shown"])
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    """Of bytes and Cohere's marks, which texts of answers leave out, or have."""
    vocabulary = {sign: i for i, sign in enumerate(bytes_to_unicode().values())}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    found = PreTrainedTokenizerFast(tokenizer_object=backend)
    found.add_tokens([*MARKS, *OTHERS[:2]], special_tokens=request.param)
    found.add_tokens(OTHERS[2:], special_tokens=True)
    found.chat_template = "{{ tools }}<|START_ACTION|>[<|START_RESPONSE|>"
    return found


def asked_for(tokenizer: PreTrainedTokenizerFast, **more: Any) -> Asked:
    body = ChatRequest.model_validate(
        {"messages": [{"role": "user", "content": "2 + 2?"}], "logprobs": False, **more}
    )
    llm: Any = SimpleNamespace(
        tokenizer=tokenizer, adapters=(), get_default_sampling_params=SamplingParams
    )
    return asked(body, "command", llm)


def completion(
    tokenizer: PreTrainedTokenizerFast, text: str, prompt: str = "<|CHATBOT_TOKEN|>"
) -> Completion:
    ids = tokenizer(text).input_ids
    seen = str(tokenizer.decode(ids, skip_special_tokens=True))
    return Completion(0, 0, None, tuple(tokenizer(prompt).input_ids), seen, tuple(ids), "stop")


def streamed(asked: Asked, answer: Completion) -> dict[str, Any]:
    """What a stream gives of an answer that comes token by token."""

    async def pieces() -> AsyncIterator[Piece]:
        for token in answer.token_ids[:-1]:
            yield Piece(0, (token,), (), None)
        yield Piece(0, answer.token_ids[-1:], (), answer)

    @asynccontextmanager
    async def answering(*_: Any) -> AsyncIterator[Any]:
        yield SimpleNamespace(
            pieces=pieces, prompt=answer.prompt_token_ids, prompt_tokens=1, started=0.0, times={}
        )

    async def events() -> list[bytes]:
        engine = Engine("command", 1, 1.0)
        cast(Any, engine).answering = answering
        found = Generated(engine, asked)._events(cast(Any, None), {})
        return [one async for one in found]

    deltas = [
        json.loads(one.removeprefix(b"data: "))["choices"][0]["delta"]
        for one in asyncio.run(events())
    ]
    said = {
        name: "".join(one.get(name) or "" for one in deltas)
        for name in ("reasoning_content", "content")
    }
    calls = [call for one in deltas for call in one.get("tool_calls", ())]
    return said | {"calls": [call["function"]["name"] for call in calls]}


def whole(asked: Asked, answer: Completion) -> dict[str, Any]:
    (choice,) = asked.document([answer], 1)["choices"]
    message = choice["message"]
    calls = [call["function"]["name"] for call in message.get("tool_calls", ())]
    said = {name: message.get(name) or "" for name in ("reasoning_content", "content")}
    return said | {"calls": calls}


@pytest.mark.parametrize("look", [whole, streamed])
@pytest.mark.parametrize(
    ("text", "thinking", "content", "calls"),
    [
        (THOUGHT + RESPONSE, "Hm, é.\n", "Four < 5.", []),
        (THOUGHT + RESPONSE.replace("RESPONSE", "TEXT"), "Hm, é.\n", "Four < 5.", []),
        (RESPONSE, "", "Four < 5.", []),
        (THOUGHT + "Four", "Hm, é.\n", "Four", []),
        ("<|START_THINKING|>Hm, <|START", "Hm, <|START", "", []),
        ("Four", "", "Four", []),
        ("<|START_THINKING|>Hm." + r7b(LOOK), "Hm.", "", ["look"]),
        (THOUGHT + r7b(LOOK), "Hm, é.\n", "", ["look"]),
        (THOUGHT + r7b(("look", {"city": THOUGHT})), "Hm, é.\n", "", ["look"]),
        (THOUGHT + RESPONSE + "<|END_OF_TURN_TOKEN|>", "Hm, é.\n", "Four < 5.", []),
    ],
)
def test_thinking_is_apart(
    tokenizer: PreTrainedTokenizerFast, look: Any, text: str, thinking: str, content: str,
    calls: list[str],
) -> None:  # fmt: skip
    more = {"tools": TOOLS} if calls else {}
    found = look(asked_for(tokenizer, **more), completion(tokenizer, text))
    assert found == {"reasoning_content": thinking, "content": content, "calls": calls}


@pytest.mark.parametrize("look", [whole, streamed])
@pytest.mark.parametrize("tools", [False, True])
def test_a_prompt_may_end_in_thinking(
    tokenizer: PreTrainedTokenizerFast, look: Any, tools: bool
) -> None:
    one = completion(tokenizer, "Hm.<|END_THINKING|><|START_TEXT|>4", "<|START_THINKING|>")
    found = look(asked_for(tokenizer, **({"tools": TOOLS} if tools else {})), one)
    assert found == {"reasoning_content": "Hm.", "content": "4", "calls": []}
    one = completion(tokenizer, "4", "<|START_THINKING|><|END_THINKING|>")
    assert look(asked_for(tokenizer), one)["content"] == "4"


def test_calls_that_nobody_asked_for_are_text(tokenizer: PreTrainedTokenizerFast) -> None:
    text = r7b(("look", {"city": THOUGHT}))
    one, asked = completion(tokenizer, "<|START_THINKING|>Hm." + text), asked_for(tokenizer)
    seen = tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True)
    assert whole(asked, one) == {"reasoning_content": "Hm.", "content": seen, "calls": []}
    assert streamed(asked, one) == whole(asked, one)


def test_what_must_match_does_not_think(tokenizer: PreTrainedTokenizerFast) -> None:
    one = completion(tokenizer, '{"name": "look", "arguments": {}}', "<|START_THINKING|>")
    asked = asked_for(tokenizer, tools=TOOLS, tool_choice="required")
    assert whole(asked, one)["calls"] == ["look"]
    asked = asked_for(tokenizer, response_format={"type": "json_object"})
    assert whole(asked, one)["content"] == one.text


@pytest.mark.parametrize("size", range(1, 40, 3))
def test_marks_are_torn_across_pieces(size: int) -> None:
    text, stream = (
        "I" + THOUGHT + RESPONSE + r7b(("look", {"city": THOUGHT})),
        Thinking(False, keeps=True),
    )
    pieces = [stream.add(text[at : at + size]) for at in range(0, len(text), size)]
    thinking, said, _ = parted(text, text, begun=False)
    assert ["".join(parts) for parts in zip(*pieces, strict=True)] == [thinking, said]
    assert stream.finish(thinking, said) == ("", "")


def test_other_templates_have_no_thinking(tokenizer: PreTrainedTokenizerFast) -> None:
    form = Form("chat", "other", tokenizer, None)
    plain = Asked(form, "", SamplingParams(), None, False, False, None)
    one = completion(tokenizer, THOUGHT + "4")
    assert whole(plain, one)["content"] == one.text


def test_thinking_is_told_to_the_template() -> None:
    """Clients send back what an answer had."""
    message = Message(role="assistant", content="4", reasoning_content="Hm.")
    assert message.plain()["reasoning_content"] == "Hm."
