"""Answers that call functions."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel

from qoff.api.errors import ApiError
from qoff.api.thinking import Thinking
from qoff.api.tools import OPEN, Calls, ended, may_be_calls, split, written
from qoff.engine import LLM, StructuredOutputs
from qoff.engine.grammar import Grammars
from qoff.serve.text import AnswerStream, TextStream

from .conftest import MODEL, Running
from .test_structured import CHAT, SCHEMA, _Characters, llm

__all__ = ["llm"]  # a fixture
TOOL: Any = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
OTHER: Any = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_a_function_that_must_be_called_is(client: OpenAI, stream: bool, choice: Any) -> None:
    found: Any = client.chat.completions.create(
        model=MODEL, messages=CHAT, tools=[TOOL, OTHER], tool_choice=choice, stream=stream,
        temperature=0, max_tokens=100,
    )  # fmt: skip
    if stream:
        chunks = [chunk.choices[0] for chunk in found]
        (call,) = [call for chunk in chunks for call in chunk.delta.tool_calls or ()]
        reason, text = chunks[-1].finish_reason, "".join(c.delta.content or "" for c in chunks)
    else:
        (call,) = found.choices[0].message.tool_calls
        reason, text = found.choices[0].finish_reason, found.choices[0].message.content or ""
    assert set(json.loads(call.function.arguments)) == {"a", "b"}
    assert text == ""
    if choice == "required":
        assert (call.function.name in ("look", "add"), reason) == (True, "tool_calls")
    else:
        assert (call.function.name, reason) == ("add", "stop")


def test_calls_and_their_results_are_told_to_the_template(served: Running) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}
    messages = [*CHAT, {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "1", "content": "found"}]  # fmt: skip
    status, found, _ = served.ask("/tokenize", {"messages": messages})
    text = served.ask("/detokenize", {"tokens": found["tokens"]})[1]["prompt"]
    assert (status, '"arguments": {"a": 1}' in text, "tool: found" in text) == (200, True, True)
    call["function"]["arguments"] = "{"  # type: ignore[index]
    assert served.ask("/tokenize", {"messages": messages})[0] == 400


class Street(BaseModel):
    streets: list[Street]


class House(BaseModel):
    street: Street


ITSELF = {"type": "object", "properties": {"x": {"$ref": "#"}}, "additionalProperties": False}


@pytest.mark.parametrize("count", [1, 3])
def test_references_in_parameters_are_within_these(llm: LLM, count: int) -> None:
    """Of one function and of several, with definitions of the same name."""
    street = {"type": "object", "$defs": {"Street": {"const": 1}},
              "properties": {"street": {"$ref": "#/$defs/Street"}}}  # fmt: skip
    house: Any = pydantic_function_tool(House)["function"]["parameters"]
    tools = dict(list({"house": house, "other": street, "itself": ITSELF}.items())[:count])
    calls = Calls(tools, must=True, named=False, one_only=False)
    assert llm.tokenizer is not None
    reader: Any = SimpleNamespace(tokenizer=llm.tokenizer)
    grammars = Grammars(reader, frozenset({2}))
    for text, right in (
        ('{"name":"house","arguments":{"street":{"streets":[{"streets":[]}]}}}', True),
        ('{"name":"house","arguments":{"street":1}}', False),
        ('{"name":"other","arguments":{"street":1}}', count > 1),
        ('{"name":"itself","arguments":{"x":{"x":{}}}}', count > 1),
        ('{"name":"itself","arguments":{"x":{"name":"itself"}}}', False),
    ):
        grammar = grammars.matcher(StructuredOutputs(json=calls.schema()))
        taken = [grammar.take(token) for token in llm.tokenizer.encode(text)]
        assert (not any(taken)) == right, text


def test_stop_texts_do_not_end_a_call_that_must_be(client: OpenAI, llm: LLM) -> None:
    assert llm.tokenizer is not None
    quote = llm.tokenizer.encode('"')
    for more in ({"stop": ['"', ":"]}, {"extra_body": {"stop_token_ids": quote}}):
        found = client.chat.completions.create(
            model=MODEL, messages=CHAT, tools=[TOOL], tool_choice="required", temperature=0,
            max_tokens=100, **more,
        )  # fmt: skip
        assert found.choices[0].finish_reason == "tool_calls"
        assert found.choices[0].message.tool_calls


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_must_be_is_one_when_it_is_cut_off(client: OpenAI, stream: bool) -> None:
    def asked(most: int) -> tuple[Any, str, str]:
        found: Any = client.chat.completions.create(
            model=MODEL, messages=CHAT, tools=[TOOL], tool_choice="required", temperature=0,
            max_tokens=most, stream=stream,
        )  # fmt: skip
        parts = [chunk.choices[0] for chunk in found] if stream else [found.choices[0]]
        said = [part.delta if stream else part.message for part in parts]
        calls = [call for one in said for call in one.tool_calls or ()]
        return calls, "".join(one.content or "" for one in said), parts[-1].finish_reason

    ((whole,), _, _) = asked(100)
    ((cut,), text, reason) = asked(40)
    assert (cut.function.name, text, reason) == ("look", "", "length")
    assert 0 < len(cut.function.arguments) < len(whole.function.arguments)
    assert asked(4)[::2] == ([], "length")


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"name": "look"', ""),
        ('{"name": "look", "argum', ""),
        ('{"name": "look", "arguments": {"a": "}', '{"a": "}'),
        ('{"name": "look", "arguments": {"a": 1} ', '{"a": 1}'),
        ('{"name": "loo', None),
        ('{"name": "other", "arguments": {', None),
    ],
)
def test_arguments_of_a_call_that_was_cut_off(text: str, arguments: str | None) -> None:
    said, calls = split(replace(AUTO, must=True), text)
    assert said == (text if arguments is None else "")
    assert [one["function"]["arguments"] for one in calls] == [arguments] * (said == "")


def test_the_clients_helper_is_told_when_arguments_are_complete(client: OpenAI) -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=CHAT, tools=[TOOL], tool_choice="required", temperature=0,
        max_tokens=100,
    ) as stream:  # fmt: skip
        kinds = [one.type for one in stream]
        last = stream.get_final_completion().choices[0]
    assert kinds.count("tool_calls.function.arguments.done") == 1
    assert last.finish_reason == "tool_calls"


@pytest.mark.parametrize(
    "more",
    [
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "no"}}},
        {"tool_choice": "required"},
        {"tools": [{"type": "function", "function": {"name": "a b"}}]},
        {"tools": [TOOL], "response_format": {"type": "json_object"}},
    ],
)
def test_wrong_tools_are_refused(served: Running, more: Any) -> None:
    assert served.ask("/v1/chat/completions", {"messages": CHAT, **more})[0] == 400


CALL = '<tool_call>\n{"name": "look", "arguments": {"a": "ü"}}\n</tool_call>'


AUTO = Calls({"look": {}}, must=False, named=False, one_only=False)


@pytest.mark.parametrize(
    ("text", "rest", "count"),
    [
        ("hello", "hello", 0),
        (CALL, "", 1),
        (f"Let me see. {CALL}\n{CALL}", "Let me see. ", 2),
        (CALL.removesuffix("</tool_call>"), "", 1),  # its end is a stop token, or was cut off
        (CALL[:30], CALL[:30], 0),
        (CALL.replace('"ü"', "NaN"), ..., 0),
        (CALL.replace('"ü"', "1e999"), ..., 0),
        ("<tool_call>[1]</tool_call> a", "<tool_call>[1]</tool_call> a", 0),
        ('<tool_call>{"name": 1, "arguments": {}}</tool_call>', ..., 0),
        ("<tool_call>" + "[" * 100_000, ..., 0),
    ],
)
def test_calls_are_found_in_an_answer(text: str, rest: Any, count: int) -> None:
    said, calls = split(AUTO, text)
    assert (said, len(calls)) == (text if rest is ... else rest, count)
    for call in calls:
        assert json.loads(call["function"]["arguments"]) == {"a": "ü"}
    assert ended(AUTO, calls, "stop") == ("tool_calls" if count else "stop")


LLAMA = '{"name": "look", "parameters": {"a": "ü"}}'


MISTRAL = '[{"name": "look", "arguments": {"a": "ü"}}]'


NEWER = '{"a": "ü"}'  # of Mistral's models, behind a name


WHOLE = replace(AUTO, whole=True)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (LLAMA, 1),
        (f" <|python_tag|>{LLAMA}; {LLAMA}\n", 2),
        (f"[TOOL_CALLS] {MISTRAL[:-1]}, {MISTRAL[1:]}", 2),
        (f"<|tool_call|>{MISTRAL}", 1),  # Granite's
        (f"<tool_call>{MISTRAL}</tool_call>\n", 1),
        (f"<|tool_call|>{MISTRAL}<|/tool_call|>", 1),
        (f"functools{MISTRAL}", 1),  # Phi-4-mini's
        (f"functools {LLAMA}", 1),
        (f"functools is a module of Python, {MISTRAL}", 0),
        (f"Let me see. {LLAMA}", 0),
        (LLAMA.replace("look", "other"), 0),
        (f"{LLAMA} I said", 0),
        (LLAMA[:-1], 0),
        ("[1]", 0),
        ("{}", 0),
        (f"[TOOL_CALLS]look[ARGS]{NEWER}[TOOL_CALLS]look[ARGS] {NEWER}", 2),
        (f"look{NEWER}look{NEWER}", 2),  # special tokens are not shown
        (f"[TOOL_CALLS]look[CALL_ID]aB3456789[ARGS]{NEWER}", 1),
        (f"lookaB3456789{NEWER}", 1),
        (f"other[ARGS]{NEWER}", 0),
        (f"look[ARGS]{NEWER}other[ARGS]{NEWER}", 0),
        (f"look[ARGS]{NEWER[:-1]}", 0),
        ("look[ARGS]", 0),
        (f"look at {NEWER}", 0),
        ("", 0),
        ("[" * 100_000, 0),
    ],
)
def test_an_answer_that_is_calls_is_none_but_these(text: str, count: int) -> None:
    said, calls = split(WHOLE, text)
    assert (said, len(calls)) == ("" if count else text, count)
    for call in calls:
        assert json.loads(call["function"]["arguments"]) == {"a": "ü"}
        assert re.fullmatch(r"\w{9}", call["id"])
    assert len(split(replace(WHOLE, one_only=True), text)[1]) == min(count, 1)


@pytest.mark.parametrize("whole", [False, True])
def test_a_call_that_must_be_has_an_identifier_of_the_templates_form(whole: bool) -> None:
    _, (call,) = split(replace(AUTO, must=True, whole=whole), MISTRAL[1:-1])
    assert re.fullmatch(r"[A-Za-z0-9]{9}" if whole else r"call_\w{24}", call["id"])


def test_templates_say_how_calls_are_written() -> None:
    llama = (
        'tools: {"name": function name, "parameters": dictionary of argument name and its value}'
    )
    plain = Calls({}, must=False, named=False, one_only=False)
    for template, form in (
        (llama, replace(plain, whole=True)),
        ("tools [TOOL_CALLS]", replace(plain, whole=True)),
        (f"tools {OPEN}", plain),
        ("tools <|channel|>", replace(plain, marked="harmony")),
        ("tools <start_function_call>", replace(plain, marked="gemma")),
        ("tools <|tool_call>", replace(plain, marked="gemma")),
        ("tools <\uff5ctool▁calls▁begin\uff5c>", replace(plain, marked="deepseek")),
        ("tools <|tool_calls_section_begin|>", replace(plain, marked="kimi")),
        ("tools <|tool_call|>", replace(plain, whole=True)),
        (f"tools <|tool_call|> {OPEN}", replace(plain, whole=True)),
        ("tools functools[", replace(plain, whole=True)),
    ):
        assert written(plain, template) == form
    for other in ("{{ tools }}", OPEN, None):
        with pytest.raises(ApiError, match="in none of the forms"):
            written(plain, other)


@pytest.mark.parametrize(
    "text",
    [
        LLAMA, f"<|tool_call|>{MISTRAL}", f"functools{MISTRAL}",
        f"[TOOL_CALLS]{MISTRAL}", "Let me {see}", " [TOO", "", "lo", f"look{NEWER}",
        f"look[ARGS]{NEWER}", f"lookaB3456789 {NEWER}", "look[ARGS", "Let[ARGS]",
        "looks as I said", "looking_for", "look at",
    ],
)  # fmt: skip
def test_a_stream_holds_back_what_may_be_calls_alone(text: str) -> None:
    stream, given = characters(), ""
    for character in text:
        given += stream.add([ord(character)], lambda said: may_be_calls(said, WHOLE.tools))[1]
    is_text = text.startswith(("Let", "looks as", "looking_for", "look at"))
    assert given == (text if is_text else "")
    said, _ = split(WHOLE, text)
    assert given + stream.finish("", said)[1] == said


@pytest.mark.parametrize("text", ["plain <tool", f"Let me see. {CALL}", "äö< <tool_ca <stop> x"])
def test_a_stream_of_text_never_shows_what_may_be_a_call(text: str) -> None:
    """Nor the beginning of a stop text; all of the rest is given out, in time."""
    stream, given = characters(["<stop>"], [OPEN]), ""
    before, stop, _ = text.partition("<stop>")
    for character in before + stop[:-1]:  # the last one ends the answer
        given += stream.add([ord(character)])[1]
        assert OPEN not in given
    first = min(at for at in (text.find(OPEN), len(before)) if at >= 0)
    assert text[:first].startswith(given)
    assert given + stream.finish("", text[:first])[1] == text[:first]


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_stop_text_that_came_too_early_is_given(size: int) -> None:
    """size: tokens of a round. What may become one that counts is held back."""
    stream, given = characters(["abab", "x."], [OPEN]), ""
    text = "1 x. 2 abab"
    for at in range(0, len(text), size):
        given += stream.add([ord(one) for one in text[at : at + size]])[1]
        assert text.startswith(given)
        assert len(given) >= min(at + size, len(text)) - 3
    assert given == "1 x. 2 ab"  # "abab" may begin again
    assert stream.finish("", "1 x. 2 ab") == ("", "")


def characters(stops: Sequence[str] = (), begins: Sequence[str] = ()) -> AnswerStream:
    """A stream whose tokens are characters."""
    text = TextStream(_Characters(None), stops)  # type: ignore[arg-type]
    return AnswerStream(text, Thinking(None, False, False), begins)
