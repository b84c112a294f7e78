"""Calls of functions within `<tool_call>` that are tags in place of JSON.

Qwen3-Coder's, of Qwen3.5 and Nemotron 3, too: `<function=NAME><parameter=KEY>
VALUE
</parameter>...</function>`. GLM 4.5's: `NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>...`,
with or without line breaks between. A value is a text where the function's schema says so, and
JSON elsewhere; what is no JSON stays text. As vLLM's tool parsers qwen3_coder and glm45 read them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

_FUNCTION = re.compile(r"\s*+<function=([^<>\s]++)>\s*+")
_PARAMETER = re.compile(r"<parameter=([^<>\n]++)>\n?")
# What ends a value is before what may follow one: a value may quote tags.
_PARAMETER_END = re.compile(r"\n?</parameter>\s*+(?=<parameter=|</function>)")
_NAME = re.compile(r"\s*+([^<>\s]++)\s*+(?=<arg_key>|</tool_call>)")
_KEY = re.compile(r"<arg_key>([^<>]*+)</arg_key>\s*+<arg_value>")
_VALUE_END = re.compile(r"</arg_value>\s*+(?=<arg_key>|</tool_call>)")
_END = re.compile(r"\s*+(?:</tool_call>\s*+|\Z)")
_LITERALS = {"true": True, "false": False, "null": None, "none": None}  # Python's, too


class Tagged(NamedTuple):
    """A call: the function's name, its arguments, and where in the text it ends."""

    name: str
    arguments: dict[str, Any]
    end: int


def tagged_call(text: str, at: int, tools: Mapping[str, Mapping[str, Any]]) -> Tagged | None:
    """The call of one of the functions whose tags begin `at`, behind `<tool_call>`.

    tools: schemas of the functions' parameters, by name. None for what is no such call, or is not
    complete.
    """
    if head := _FUNCTION.match(text, at):
        found = _read(text, head, tools, _PARAMETER, _PARAMETER_END, "</function>", str)
    elif head := _NAME.match(text, at):
        found = _read(text, head, tools, _KEY, _VALUE_END, "", _json)
    else:
        return None
    if found is None or (end := _END.match(text, found.end)) is None:
        return None
    return found._replace(end=end.end())


def _read(
    text: str,
    head: re.Match[str],
    tools: Mapping[str, Mapping[str, Any]],
    key: re.Pattern[str],
    value_end: re.Pattern[str],
    close: str,
    untyped: Any,
) -> Tagged | None:
    """A call behind its head; close: what is behind its arguments. untyped: reads their values."""
    name, at, found = head[1], head.end(), dict[str, Any]()
    if name not in tools:
        return None
    while begun := key.match(text, at):
        end = value_end.search(text, begun.end())
        if end is None:
            return None
        said, one = text[begun.end() : end.start()], begun[1].strip()
        found[one] = _value(said, _types(tools[name], one), untyped)
        at = end.end()
    return Tagged(name, found, at + len(close)) if text.startswith(close, at) else None


def _types(schema: Mapping[str, Any], key: str) -> set[str]:
    """The types that a parameter may have by its function's schema; none where it does not say."""
    properties = schema.get("properties")
    one = properties.get(key) if isinstance(properties, Mapping) else None
    if not isinstance(one, Mapping):
        return set()
    options = [one, *(one.get("anyOf") or one.get("oneOf") or ())]
    given = [option.get("type") for option in options if isinstance(option, Mapping)]
    return {
        each
        for types in given
        for each in (types if isinstance(types, list) else [types])
        if isinstance(each, str)
    }


def _value(said: str, types: set[str], untyped: Any) -> Any:
    if not types:
        return untyped(said)
    if "null" in types and said.strip().lower() in ("null", "none"):
        return None
    return said if "string" in types else _json(said)


def _json(said: str) -> Any:
    """The JSON that a text is, or the text."""
    literal = said.strip().lower()
    if literal in _LITERALS:
        return _LITERALS[literal]
    try:
        return json.loads(said)
    except (ValueError, RecursionError):
        return said
