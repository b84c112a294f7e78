"""Calls of functions in an answer, as most chat templates have models write them.

Hermes' form, of Qwen, SmolLM3 and many others: `<tool_call>{"name": ..., "arguments": {...}}
</tool_call>`, any number of them. An answer that must call a function is that JSON alone.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import ApiError

OPEN = "<tool_call>"
_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>\s*|\Z)", re.DOTALL)


@dataclass(frozen=True)
class Calls:
    """Functions that an answer may call, by name, with their parameters' schemas."""

    tools: Mapping[str, Mapping[str, Any]]
    must: bool  # exactly one of them
    named: bool  # by the client
    one_only: bool  # at most

    def schema(self) -> dict[str, Any]:
        """Of an answer that is one call."""
        options = [
            {
                "type": "object",
                "properties": {"name": {"const": name}, "arguments": schema or {"type": "object"}},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for name, schema in self.tools.items()
        ]
        return {"anyOf": options}


def check_template(template: object) -> None:
    """Raise ApiError for a chat template that does not say how functions are called."""
    if "tools" not in str(template) or OPEN not in str(template):
        raise ApiError(
            400,
            f"the model's chat template does not have tools in the form {OPEN}...</tool_call>",
            param="tools",
        )


def split(calls: Calls | None, text: str) -> tuple[str, list[dict[str, Any]]]:
    """What an answer says, and OpenAI's objects of the calls in it.

    What is not the JSON of a call, because the answer was cut off, say, stays text.
    """
    if calls is None:
        return text, []
    if calls.must:
        one = _call(text)
        return (text, []) if one is None else ("", [one])
    found: list[dict[str, Any]] = []
    kept = []
    end = 0
    for match in _CALL.finditer(text):
        one = _call(match[1])
        if one is not None:
            found.append(one)
            kept.append(text[end : match.start()])
            end = match.end()
    del found[1 if calls.one_only else len(found) :]
    return "".join([*kept, text[end:]]), found


def ended(calls: Calls | None, found: list[dict[str, Any]], reason: str) -> str:
    """Why an answer has ended: for its calls, unless the client has named the function."""
    by_call = found and reason == "stop" and calls is not None and not calls.named
    return "tool_calls" if by_call else reason


def _call(text: str) -> dict[str, Any] | None:
    try:
        said = json.loads(text)
        name, arguments = said["name"], said["arguments"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
