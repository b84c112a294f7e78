"""Calls of functions in an answer, as chat templates have models write them.

Hermes' form, of Qwen, SmolLM3 and many others: `<tool_call>{"name": ..., "arguments": {...}}
</tool_call>`, any number of them beside text; with tags in place of JSON, see `tagged_calls`. Llama
3's, whose whole answer is `{"name": ..., "parameters": {...}}`, and Mistral's: a list of such
objects with "arguments" behind `[TOOL_CALLS]`, or, newer, `[TOOL_CALLS]name[ARGS]{...}`, one after
another; its marks are special tokens, which texts of answers leave out. Granite 3's is such a list
behind `<|tool_call|>` or `<tool_call>`, Phi-4-mini's behind `functools`. Those of gpt-oss, Gemma,
DeepSeek and Kimi are in `marked_calls`, Cohere's in `cohere_calls`. An answer that must call a
function is one object alone.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from .call_forms import FORMS, form_of
from .errors import ApiError
from .marked_calls import Found, beside
from .tagged_calls import tagged_call

OPEN = "<tool_call>"
_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>\s*|\Z)", re.DOTALL)
# What is in a template of a form whose calls are a whole answer.
_WHOLE = (
    '"parameters": dictionary of argument name and its value',
    "[TOOL_CALLS]",
    "<|tool_call|>",
    "functools[",
)
# Before them, where a tokenizer shows these, and behind.
_MARKS = ("<|python_tag|>", "[TOOL_CALLS]", "<|tool_call|>", OPEN, "functools")
_ENDS = ("</tool_call>", "<|/tool_call|>")
# Between a name and its arguments in Mistral's newer form; one version has an identifier there.
_BETWEEN = r"(?:(?:\[CALL_ID\])?[A-Za-z0-9]{9})?(?:\[ARGS\])?\s*"
_BEGUN = re.compile(rf"{_BETWEEN}\{{|\[|[A-Za-z0-9]{{0,9}}\s*\Z")  # what may become that
# The name in a call that must be, and what there is of its arguments.
_CUT = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]+)"(?:\s*,\s*"arguments"\s*:\s*(.*))?', re.DOTALL)


@dataclass(frozen=True)
class Calls:
    """Functions that an answer may call, by name, with their parameters' schemas."""

    tools: Mapping[str, Mapping[str, Any]]
    must: bool  # exactly one of them
    named: bool  # by the client
    one_only: bool  # at most
    whole: bool = False  # an answer is calls, or text
    marked: str = ""  # the form of calls between special tokens

    @property
    def begins(self) -> list[str]:
        """What calls in a text begin with, which is not to be shown."""
        if self.whole:
            return []
        return FORMS[self.marked].begins(self.tools) if self.marked else [OPEN]

    def schema(self) -> dict[str, Any]:
        """Of an answer that is one call."""
        options = [
            {
                "type": "object",
                "properties": {"name": {"const": name}, "arguments": _rooted(schema, number)},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for number, (name, schema) in enumerate(self.tools.items())
        ]
        return {"anyOf": options}


def _rooted(schema: Mapping[str, Any], number: int) -> dict[str, Any]:
    """A function's parameters within another schema: `#` in their references stays their root."""
    if not schema:
        return {"type": "object"}
    return {**schema, "$id": schema.get("$id") or f"qoff:/{number}"}


def written(calls: Calls, template: object) -> Calls:
    """The same calls, in the form that a chat template has models write them.

    Raises ApiError for one that has them write no form that is known here.
    """
    text = str(template)
    if "tools" in text and OPEN in text and "<|tool_call|>" not in text:
        return calls
    if "tools" in text and (marked := form_of(text)):
        return replace(calls, marked=marked)
    if "tools" in text and any(mark in text for mark in _WHOLE):
        return replace(calls, whole=True)
    raise ApiError(
        400,
        f"the model's chat template has tools in none of the forms {OPEN}...</tool_call>, Llama's, "
        "Mistral's, Granite's, Phi's, Gemma's, gpt-oss's, DeepSeek's, Kimi's and Cohere's",
        param="tools",
    )


def may_be_calls(text: str, names: Iterable[str] = ()) -> bool:
    """Whether an answer that begins so may be calls as a whole; without text it may.

    names: of the functions.
    """
    said = text.lstrip()
    if not said or said[0] in "{[" or any(m.startswith(said[: len(m)]) for m in _MARKS):
        return True
    return any(
        one.startswith(said) or (said.startswith(one) and _BEGUN.match(said, len(one)))
        for one in names
    )


def split(
    calls: Calls | None, text: str, with_marks: Callable[[], str] | None = None
) -> tuple[str, list[dict[str, Any]]]:
    """What an answer says, and OpenAI's objects of the calls in it.

    with_marks: its text with special tokens; None: `text` has them. What is not the JSON of a call,
    because the answer was cut off, say, stays text. A call that must be is one as soon as its
    function is known, with its arguments as far as they are written.
    """
    if calls is None:
        return text, []
    if calls.must:
        one = _call(text, calls.whole) or _cut_off(calls, text)
        return (text, []) if one is None else ("", [one])
    if calls.whole:
        return _whole(calls, text)
    if calls.marked:
        return _marked(calls, text, text if with_marks is None else with_marks())
    found: list[dict[str, Any]] = []
    kept = []
    end = at = 0
    while match := _CALL.search(text, at):
        one, at = _call(match[1]), match.end()
        if one is None and (tagged := tagged_call(text, match.start(1), calls.tools)):
            said = {"name": tagged.name, "arguments": tagged.arguments}
            one, at = _call_of(said, _number(whole=False)), tagged.end
        if one is not None:
            found.append(one)
            kept.append(text[end : match.start()])
            end = at
    del found[1 if calls.one_only else len(found) :]
    return "".join([*kept, text[end:]]), found


def ended(calls: Calls | None, found: list[dict[str, Any]], reason: str) -> str:
    """Why an answer has ended: for its calls, unless the client has named the function."""
    by_call = found and reason == "stop" and calls is not None and not calls.named
    return "tool_calls" if by_call else reason


def _marked(calls: Calls, text: str, said: str) -> tuple[str, list[dict[str, Any]]]:
    """The same of an answer whose calls are between special tokens, which `said` has."""
    found, read = list[dict[str, Any]](), list[Found]()
    for call in FORMS[calls.marked].calls(said, calls.tools):
        written = {"name": call.name, "arguments": call.arguments}
        one = _call_of(written, call.number or _number(whole=False))
        if one is not None:
            found.append(one)
            read.append(call)
    return beside(read, text, said), found[: 1 if calls.one_only else None]


def _whole(calls: Calls, text: str) -> tuple[str, list[dict[str, Any]]]:
    """The same of an answer that is an object, several with semicolons between, or a list.

    Or a name and an object, any number of times.
    """
    names = "|".join(map(re.escape, sorted(calls.tools, key=len, reverse=True)))
    named = re.compile(rf"({names}){_BETWEEN}(?=\{{)")
    said = text.strip()
    found: list[Any] = []
    try:
        while said:
            for mark in _MARKS:
                said = said.removeprefix(mark).lstrip()
            name = named.match(said)
            one, end = json.JSONDecoder().raw_decode(said, name.end() if name else 0)
            if name:
                one = {"name": name[1], "arguments": one}
            found += one if isinstance(one, list) else [one]
            said = said[end:].lstrip("; \n")
            for mark in _ENDS:
                said = said.removeprefix(mark).lstrip()
    except (ValueError, RecursionError):
        return text, []
    made = [_call_of(one, _number(whole=True)) for one in found]
    known = [one for one in made if one is not None and one["function"]["name"] in calls.tools]
    if not known or len(known) < len(made):
        return text, []
    return "", known[: 1 if calls.one_only else None]


def _number(whole: bool) -> str:
    """A call's identifier; Mistral's templates take those of nine characters alone."""
    return secrets.token_hex(5)[:9] if whole else f"call_{secrets.token_hex(12)}"


def _call(text: str, whole: bool = False) -> dict[str, Any] | None:
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return _call_of(said, _number(whole))


def _cut_off(calls: Calls, text: str) -> dict[str, Any] | None:
    """The call that an answer begins; None where its function is not known yet."""
    match = _CUT.match(text)
    if match is None or match[1] not in calls.tools:
        return None
    arguments = match[2] or ""
    with suppress(ValueError, RecursionError):  # they are complete, and the object around them not
        arguments = arguments[: json.JSONDecoder().raw_decode(arguments)[1]]
    return _object(match[1], arguments, _number(calls.whole))


def _call_of(said: Any, number: str) -> dict[str, Any] | None:
    """OpenAI's object of what a model has written of a call; None where it is none."""
    if not isinstance(said, dict):
        return None
    name, arguments = said.get("name"), said.get("arguments", said.get("parameters"))
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    try:  # Infinity and NaN are no JSON, nor is 1e999, which is read as one of them
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return None
    return _object(name, written, number)


def _object(name: str, arguments: str, number: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": number, "type": "function", "function": function}
