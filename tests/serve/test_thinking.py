"""Thinking between marks, which documents have apart from what an answer says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode
from typer.testing import CliRunner

from qoff.api.answers import Form
from qoff.api.messages import Message
from qoff.api.protocol import ChatRequest
from qoff.api.requests import Asked, asked
from qoff.api.thinking import Thinking, parted, style_of
from qoff.api.thinking_marks import STYLES, Style
from qoff.cli.main import app
from qoff.engine import Completion, SamplingParams
from qoff.jobs.lines import Line
from qoff.jobs.requests import OpenAIReader
from qoff.serve.app import Routes
from qoff.serve.engine import Engine, Piece
from qoff.serve.generation import Generated
from qoff.serve.options import ServeOptions

from .conftest import OPTIONS
from .test_tagged_calls import LOOK, TYPES, r7b

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"properties": TYPES}}}]
COHERE = "{{ tools }}<|START_ACTION|>[<|START_RESPONSE|>"
TAGS = "{{ tools }}<tool_call></think>"
OTHERS = ["<|END_ACTION|>", "<|END_OF_TURN_TOKEN|>", "<seed:cot_budget_reflect>"]
THOUGHT = "<|START_THINKING|>Hm, é.\n<|END_THINKING|>"
RESPONSE = "<|START_RESPONSE|>Four < 5.<|END_RESPONSE|>"


@pytest.fixture(scope="module", params=[True, False], ids=["hidden", "shown"])
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    """Of bytes and marks, which texts of answers leave out, or have."""
    vocabulary = {sign: i for i, sign in enumerate(bytes_to_unicode().values())}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    found = PreTrainedTokenizerFast(tokenizer_object=backend)
    marks = dict.fromkeys(mark for style in STYLES for mark in style.marks)
    found.add_tokens([*marks, OTHERS[0]], special_tokens=request.param)
    found.add_tokens(OTHERS[1:], special_tokens=True)
    return found


def asked_for(
    tokenizer: PreTrainedTokenizerFast, template: str = COHERE, thinking: bool = True, **more: Any
) -> Asked:
    tokenizer.chat_template = template
    body = ChatRequest.model_validate(
        {"messages": [{"role": "user", "content": "2 + 2?"}], "logprobs": False, **more}
    )
    return asked(body, "command", llm_with(tokenizer), thinking)


def llm_with(tokenizer: PreTrainedTokenizerFast) -> Any:
    return SimpleNamespace(
        tokenizer=tokenizer, adapters=(), get_default_sampling_params=SamplingParams
    )


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
            count=1,
            pieces=pieces,
            prompt=answer.prompt_token_ids,
            prompt_tokens=1,
            started=0.0,
            times={},
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
    more: dict[str, Any] = {"tools": TOOLS} if calls else {}
    found = look(asked_for(tokenizer, **more), completion(tokenizer, text))
    assert found == {"reasoning_content": thinking, "content": content, "calls": calls}


@pytest.mark.parametrize("look", [whole, streamed])
@pytest.mark.parametrize("tools", [False, True])
def test_a_prompt_may_end_in_thinking(
    tokenizer: PreTrainedTokenizerFast, look: Any, tools: bool
) -> None:
    one = completion(tokenizer, "Hm.<|END_THINKING|><|START_TEXT|>4", "<|START_THINKING|>")
    more: dict[str, Any] = {"tools": TOOLS} if tools else {}
    found = look(asked_for(tokenizer, **more), one)
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


HERMES = '<tool_call>{"name": "look", "arguments": {"city": "a"}}</tool_call>'
HARMONY = "{{ tools }}<|channel|>"
PLAN = "<|channel|>analysis<|message|>Hm,\n é.<|end|>"
AGAIN = "<|start|>assistant"
CALL = '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"city": "a"}<|call|>'


@pytest.mark.parametrize("look", [whole, streamed])
@pytest.mark.parametrize(
    ("text", "prompt", "found"),
    [
        ("<think>\nHm,\n é.\n</think>\n\nFour < 5.\n", "", ("Hm,\n é.", "Four < 5.\n", [])),
        ("\n <think></think>Four", "", ("", "Four", [])),
        ("<think>\n\n</think>\n\nFour", "", ("", "Four", [])),
        ("\nHm.\n</think>\n\n4", "<think>\n", ("Hm.", "4", [])),
        ("\n 4 <think>5</think>", "<think>\n\n</think>\n\n", ("", "\n 4 <think>5</think>", [])),
        ("<think>Hm, \n", "", ("Hm,", "", [])),
        ("Hm, </thi", "<think>", ("Hm, </thi", "", [])),
        ("<thin", "", ("", "<thin", [])),
        ("<think>a</think>\n<think>b</think> 4", "", ("ab", "4", [])),
        ("4 </think> 5", "", ("", "4 </think> 5", [])),
        ("<think>a <think>b</think>4 <", "", ("a <think>b", "4 <", [])),
        (f"<think>{HERMES}</think>\n{HERMES}", "", (HERMES, "", ["look"])),
        (f"I {HERMES}", "<think>", (f"I {HERMES}", "", [])),
        ("Hm.</think><|END_OF_TURN_TOKEN|>\n4", "<think>", ("Hm.", "4", [])),
    ],
)
def test_thinking_in_tags_comes_first(
    tokenizer: PreTrainedTokenizerFast, look: Any, text: str, prompt: str,
    found: tuple[str, str, list[str]],
) -> None:  # fmt: skip
    """A mark that is in what is said is text, unless the tokenizer leaves it out."""
    one = completion(tokenizer, text, prompt or "user")
    asked = asked_for(tokenizer, TAGS, tools=TOOLS)
    thinking, content, calls = found
    if not asked.form.shows("<think>"):
        thinking = thinking.replace("<think>", "")
        content = content.replace("<think>", "").replace("</think>", "")
    said = {"reasoning_content": thinking, "content": content, "calls": calls}
    assert look(asked, one) == said


@pytest.mark.parametrize("look", [whole, streamed])
@pytest.mark.parametrize(
    ("text", "found"),
    [
        (f"{PLAN}{AGAIN}<|channel|>final<|message|>4 < 5", ("Hm,\n é.", "4 < 5", [])),
        (f"{PLAN}{PLAN}{AGAIN}{CALL}", ("Hm,\n é.Hm,\n é.", "", ["look"])),
        (f" to=functions.look{CALL.replace(' to=functions.look', '')}", ("", "", ["look"])),
        (f"<|channel|>commentary<|message|>I look.<|end|>{AGAIN}{CALL}", ("", "I look.", ["look"])),
        (f"<|channel|>analysis<|message|>{HERMES}", (HERMES, "", [])),
        ("<|channel|>ana", ("", "", [])),
        ("tomato", ("", "tomato", [])),
        ("", ("", "", [])),
    ],
)
def test_channels_of_gpt_oss_are_apart(
    tokenizer: PreTrainedTokenizerFast, look: Any, text: str, found: tuple[str, str, list[str]]
) -> None:
    asked = asked_for(tokenizer, HARMONY, tools=TOOLS)
    said = dict(zip(("reasoning_content", "content", "calls"), found, strict=True))
    assert look(asked, completion(tokenizer, text + "<|END_OF_TURN_TOKEN|>", AGAIN)) == said


@pytest.mark.parametrize("size", range(1, 40, 3))
@pytest.mark.parametrize("style", STYLES, ids=lambda style: style.begin)
def test_marks_are_torn_across_pieces(style: Style, size: int) -> None:
    text = f" {style.begin}\nHm, é.\n{style.end} \nFour < 5." + r7b(("look", {"city": THOUGHT}))
    stream = Thinking(style, False, keeps=True)
    pieces = [stream.add(text[at : at + size]) for at in range(0, len(text), size)]
    pieces.append(stream.add("", last=True))
    thinking, said, _ = parted(style, False, text, text, text)
    assert ["".join(parts) for parts in zip(*pieces, strict=True)] == [thinking, said]
    assert thinking.strip() == "Hm, é."
    assert said.lstrip().startswith("Four < 5.<|START_ACTION|>")


@pytest.mark.parametrize("look", [whole, streamed])
def test_calls_that_are_all_of_what_is_said_come_behind_thinking(
    tokenizer: PreTrainedTokenizerFast, look: Any
) -> None:
    call = '[TOOL_CALLS]look{"city": "a"}'
    asked = asked_for(tokenizer, "{{ tools }}[TOOL_CALLS][THINK]", tools=TOOLS)
    found = look(asked, completion(tokenizer, f"[THINK]{call} or not?[/THINK]{call}"))
    assert found == {"reasoning_content": f"{call} or not?", "content": "", "calls": ["look"]}


@pytest.mark.parametrize("look", [whole, streamed])
def test_a_prompt_may_have_more_behind_the_mark(
    tokenizer: PreTrainedTokenizerFast, look: Any
) -> None:
    """Seed-OSS's, where the budget of thinking is 0."""
    prompt = "<seed:think><seed:cot_budget_reflect>"
    one = completion(tokenizer, "None left.</seed:think>4", prompt)
    found = look(asked_for(tokenizer, "</seed:think>"), one)
    assert found == {"reasoning_content": "None left.", "content": "4", "calls": []}


@pytest.mark.parametrize("look", [whole, streamed])
def test_a_message_that_goes_on_may_be_in_its_thinking(
    tokenizer: PreTrainedTokenizerFast, look: Any
) -> None:
    for begun, thinking in (("<think>\nI", "Hm"), ("<think>I</think>", ""), ("I <think>", "")):
        messages = [{"role": "assistant", "content": begun}]
        asked = asked_for(tokenizer, TAGS, messages=messages, continue_final_message=True)
        found = look(
            asked, completion(tokenizer, "Hm", begun + " think: 1, 2, 3, 4, 5, 6, 7, 8, 9")
        )
        assert found == {"reasoning_content": thinking, "content": "" if thinking else "Hm",
                         "calls": []}  # fmt: skip


def test_answers_of_one_prompt_think_apart(tokenizer: PreTrainedTokenizerFast) -> None:
    asked = asked_for(tokenizer, TAGS, n=2)
    each = [completion(tokenizer, text) for text in ("<think>a</think>1", "<think>b")]
    found = [one["message"] for one in asked.document(each, 1)["choices"]]
    assert [one["reasoning_content"] for one in found] == ["a", "b"]
    assert [one["content"] for one in found] == ["1", ""]


@pytest.mark.parametrize(
    ("stop", "thinking", "content"),
    [("m", "H", ""), ("b> .", "Hm <", ""), ("4", "Hm <b> .", ""), (" 5", "Hm <b> .", "4")],
)
def test_a_stop_text_cuts_thinking_and_what_is_said(
    tokenizer: PreTrainedTokenizerFast, stop: str, thinking: str, content: str
) -> None:
    text = "<think>Hm <b> .</think>\n4 5"
    one = completion(tokenizer, text[: text.index(stop) + len(stop)])
    asked = asked_for(tokenizer, TAGS, stop=stop)
    cut = replace(one, text=one.text.removesuffix(stop))
    assert whole(asked, cut) == {"reasoning_content": thinking, "content": content, "calls": []}
    assert streamed(asked, cut) == whole(asked, cut)


def test_a_server_may_leave_thinking_in_the_text(tokenizer: PreTrainedTokenizerFast) -> None:
    options, llm = replace(OPTIONS, thinking=False), llm_with(tokenizer)
    one = completion(tokenizer, "<think>Hm</think>4", "<think>")
    plain = asked_for(tokenizer, TAGS, thinking=False)
    assert whole(plain, one) == {"reasoning_content": "", "content": one.text, "calls": []}
    assert streamed(plain, one) == whole(plain, one)
    body = ChatRequest.model_validate({"messages": [{"role": "user", "content": "2 + 2?"}]})
    routes = Routes(Engine("command", 1, 1.0), options)
    assert routes._asked(body, llm).thinks is None
    line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions",
            "body": body.model_dump(exclude_none=True)}  # fmt: skip
    for thinking in (True, False):
        reader = OpenAIReader(llm, "command", "job", thinking=thinking)
        request: Any = reader.read(Line(0, 1, json.dumps(line).encode()))
        assert (b"reasoning_content" in request.answered([one], 1)[0]) == thinking


@pytest.mark.parametrize(("options", "thinking"), [([], True), (["none"], False)])
def test_the_option_reaches_requests_and_batches(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str],
    thinking: bool,
) -> None:  # fmt: skip
    seen = list[tuple[bool, bool]]()

    def serve(_: Any, engine: Any, options: ServeOptions) -> None:
        seen.append((options.thinking, engine.batches._thinking))
        engine.stop()

    monkeypatch.setattr("qoff.serve.server.serve", serve)
    given = [f"--reasoning-format={one}" for one in options]
    found = CliRunner().invoke(app, ["serve", str(checkpoint), f"--files={tmp_path}", *given])
    assert (found.exit_code, seen) == (0, [(thinking, thinking)]), found.output


def test_marks_are_known_by_the_template() -> None:
    assert [style.begin for style in STYLES if style_of(f"a {style.template[-1]}") is style] == [
        style.begin for style in STYLES
    ]
    assert style_of({"default": "a", "tool_use": "{{ b }}</think>"}) is STYLES[-1]
    assert style_of("{{ messages }}") is style_of(None) is None


def test_other_templates_have_no_thinking(tokenizer: PreTrainedTokenizerFast) -> None:
    form = Form("chat", "other", tokenizer, None)
    plain = Asked(form, "", SamplingParams(), None, False, False, None)
    one = completion(tokenizer, THOUGHT + "4")
    assert whole(plain, one)["content"] == one.text


def test_thinking_is_told_to_the_template() -> None:
    """Clients send back what an answer had."""
    message = Message(role="assistant", content="4", reasoning_content="Hm.")
    assert message.plain()["reasoning_content"] == "Hm."
