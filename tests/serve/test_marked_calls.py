"""Calls of functions between special tokens: gpt-oss's, Gemma's, DeepSeek's and Kimi's forms."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from qoff.api.call_forms import FORMS
from qoff.api.tools import Calls, split

from .test_calls import characters

TOOLS: dict[str, dict[str, Any]] = {"look": {}, "look_up": {}}
ARGUMENTS = {"place": "Köln, {x}", "days": [1, 2.5], "deep": {"yes": True, "no": None}}
SAID = json.dumps(ARGUMENTS, ensure_ascii=False)
GEMMA = 'place:"Köln, {x}",days:[1,2.5],deep:{yes:true,no:null}'.replace('"', "<escape>")
GEMMA_4 = GEMMA.replace("<escape>", '<|"|>')
WIDE = re.compile(r"<\|(tool▁[a-z▁]+)\|>")
THINKS = "<|channel|>analysis<|message|>Let me see<|end|><|start|>assistant"
SPECIAL = re.compile(
    r'<[|\uff5c][a-z_▁]+\|?>|<[a-z_]+\|>|<escape>|<\|"\|>|<(?:start|end)_function_call>'
)


def wide(text: str) -> str:
    """DeepSeek's marks have bars that are not ASCII."""
    return WIDE.sub("<\uff5c\\1\uff5c>", text)


def calls(form: str) -> Calls:
    return Calls(TOOLS, must=False, named=False, one_only=False, marked=form)


@pytest.mark.parametrize(
    ("form", "text", "before"),
    [
        ("harmony", f"{THINKS}<|channel|>commentary to=functions.look_up <|constrain|>json"
                    f"<|message|>{SAID}<|call|>", "analysisLet me see"),
        ("harmony", f"<|channel|>commentary to=functions.look_up<|message|>{SAID}", ""),
        ("harmony", f"{THINKS} to=functions.look_up<|channel|>commentary <|constrain|>json"
                    f"<|message|>{SAID}<|call|>", "analysisLet me see"),
        ("gemma", f"<start_function_call>call:look_up{{{GEMMA}}}<end_function_call>", ""),
        ("gemma", f"I look.<|tool_call>call:look_up{{{GEMMA_4}}}<tool_call|>", "I look."),
        ("gemma", f"I\n<|tool_call> call:look_up{{{GEMMA_4}}}<tool_call|>\n<|turn|>look.<b>",
         "I\n look.<b>"),
        ("gemma", "<|tool_call>call:other{}<tool_call|> and "
                  f"<|tool_call>call:look_up{{{GEMMA_4}}}", "call:other{} and "),
        ("harmony", f"<|channel|>commentary to=functions.look_up<|message|>{SAID}<|call|><|start|>"
                    "assistant<|channel|>final<|message|>Seen.<|return|>", "assistantfinalSeen."),
        ("deepseek", "I look.<|tool▁calls▁begin|><|tool▁call▁begin|>function<|tool▁sep|>look_up\n"
                     f"```json\n{SAID}\n```<|tool▁call▁end|><|tool▁calls▁end|>", "I look."),
        ("deepseek", "<|tool▁calls▁begin|><|tool▁call▁begin|>look_up<|tool▁sep|>"
                     f"{SAID}<|tool▁call▁end|><|tool▁calls▁end|>", ""),
        ("kimi", "I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.look_up:0"
                 f"<|tool_call_argument_begin|>{SAID}<|tool_call_end|><|tool_calls_section_end|>",
         "I look."),
        ("kimi", "<|tool_calls_section_begin|> <|tool_call_begin|> look_up:0 "
                 f"<|tool_call_argument_begin|> {SAID} <|tool_call_end|>", "  "),
    ],
)  # fmt: skip
@pytest.mark.parametrize("shown", [False, True])
def test_calls_are_found_and_what_is_before_them(
    form: str, text: str, before: str, shown: bool
) -> None:
    """shown: the tokenizer knows no special tokens, as a text has them."""
    text = wide(text)
    plain = text if shown else SPECIAL.sub("", text)
    content, found = split(calls(form), plain, lambda: text)
    assert [one["function"]["name"] for one in found] == ["look_up"]
    assert json.loads(found[0]["function"]["arguments"]) == ARGUMENTS
    if not shown:
        assert content == before
    stream = characters((), calls(form).begins)
    given = ""
    for character in plain:
        given += stream.add([ord(character)])[1]
    assert given + stream.finish("", content)[1] == content


def test_several_calls_and_one_alone() -> None:
    one = "<|tool_call>call:look{}<tool_call|><|tool_call>call:look_up{days:3}<tool_call|>"
    _, found = split(calls("gemma"), one)
    assert [json.loads(each["function"]["arguments"]) for each in found] == [{}, {"days": 3}]
    alone = Calls(TOOLS, must=False, named=False, one_only=True, marked="gemma")
    assert len(split(alone, one)[1]) == 1


@pytest.mark.parametrize(
    ("form", "text", "found"),
    [
        ("deepseek", "<|tool▁calls▁begin|><|tool▁call▁begin|>function<|tool▁sep|>look\n```json\n"
                     '{"city": "Köln"}\n```<|tool▁call▁end|>\n<|tool▁call▁begin|>function'
                     '<|tool▁sep|>look_up\n```json\n{}\n```<|tool▁call▁end|><|tool▁calls▁end|>',
         [("call_", "look", '{"city": "Köln"}'), ("call_", "look_up", "{}")]),
        ("deepseek", '<|tool▁calls▁begin|><|tool▁call▁begin|>look<|tool▁sep|>{"city": "Köln"}'
                     "<|tool▁call▁end|><|tool▁call▁begin|>look_up<|tool▁sep|>{}"
                     "<|tool▁call▁end|><|tool▁calls▁end|>",
         [("call_", "look", '{"city": "Köln"}'), ("call_", "look_up", "{}")]),
        ("kimi", "<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0"
                 '<|tool_call_argument_begin|>{"city": "Köln"}<|tool_call_end|><|tool_call_begin|>'
                 "functions.look_up:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
                 "<|tool_calls_section_end|>",
         [("functions.look:0", "look", '{"city": "Köln"}'),
          ("functions.look_up:1", "look_up", "{}")]),
    ],
)  # fmt: skip
def test_calls_in_a_row(form: str, text: str, found: list[tuple[str, str, str]]) -> None:
    """As vLLM's tool parsers deepseek_v3, deepseek_v31 and kimi_k2 read them."""
    content, read = split(calls(form), wide(text))
    assert content == ""
    functions = [(one["function"]["name"], one["function"]["arguments"]) for one in read]
    assert functions == [one[1:] for one in found]
    for one, (number, *_) in zip(read, found, strict=True):
        assert one["id"].startswith(number)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("deepseek", "<|tool▁call▁begin|>other<|tool▁sep|>{}<|tool▁call▁end|>"),
        ("deepseek", '<|tool▁call▁begin|>look<|tool▁sep|>{"a": 1<|tool▁call▁end|>'),
        ("deepseek", "<|tool▁calls▁begin|>" + " " * 100_000),
        ("kimi", "<|tool_call_begin|>functions.look<|tool_call_argument_begin|>{}"),
        ("kimi", "<|tool_call_begin|>functions.look:" + "0" * 100_000),
        ("harmony", "<|channel|>final<|message|>to=functions.other {}"),
        ("harmony", f"<|channel|>commentary to=functions.look<|message|>{SAID[:-5]}"),
        ("harmony", "<|channel|>final<|message|>No."),
        ("harmony", '<|channel|>final<|message|>Call it with to=functions.look {"a":1} yourself'),
        ("gemma", "<|tool_call>call:other{}<tool_call|>"),
        ("harmony", "<|start|>assistant to=functions.look" + " " * 100_000),
        ("harmony", "<|start|>assistant to=functions.look_up <|channel|>" + " " * 100_000),
        ("gemma", '<|tool_call>call:look{place:<|"|>Kö'),
        ("gemma", "<|tool_call>call:look{days:[1 2]}"),
        ("gemma", "<|tool_call>call:look{" + "a:{" * 100_000),
        ("gemma", "<|tool_call>call:look{days:}"),
        ("gemma", "<|tool_call>call:look{days:-Infinity}"),
        ("gemma", "call:look is a phone call"),
    ],
)
def test_what_is_no_call_stays_text(form: str, text: str) -> None:
    text = wide(text)
    assert split(calls(form), text) == (text, [])


@pytest.mark.parametrize("broken", ["", "[1 2]"])
@pytest.mark.parametrize(
    ("form", "call", "quoted"),
    [
        ("gemma", "<start_function_call>call:look{{q:{},t:<escape>{}<escape>}}<end_function_call>",
         "<start_function_call>call:look_up{}<end_function_call>"),
        ("gemma", '<|tool_call>call:look{{q:{},text:<|"|>{}<|"|>}}<tool_call|>',
         "<tool_call|><|tool_call>call:look_up{}<tool_call|>"),
        ("harmony", '<|start|>assistant to=functions.look<|message|>{{"q":{},"t":"\\"{}"}}<|call|>',
         "<|call|><|start|>assistant to=functions.look_up<|message|>{}<|call|>"),
    ],
)  # fmt: skip
def test_what_a_call_quotes_is_none(form: str, call: str, quoted: str, broken: str) -> None:
    """Nor is what a call quotes that cannot be read; one behind it is."""
    text = call.format(broken or "1", quoted) + call.format("2", "")
    read = [json.loads(one["function"]["arguments"])["q"] for one in split(calls(form), text)[1]]
    assert read == ([2] if broken else [1, 2])


def test_arguments_of_any_depth_are_a_call_or_text() -> None:
    """As deep as can be read, and deeper; some that can be read cannot be written."""
    counts = []
    for depth in range(500, 1000):
        said = f'{{"a":{"[" * depth}{"]" * depth}}}'
        _, found = split(calls("harmony"), f"to=functions.look<|message|>{said}")
        counts.append(len(found))
    assert counts[0] == 1
    assert counts[-1] == 0


def test_forms_are_found_by_marks_of_their_own() -> None:
    marks = [mark for form in FORMS.values() for mark in form.template]
    assert len(set(marks)) == len(marks)
