"""Calls of functions as Cohere's models write them.

Cohere's models write a list of `{"tool_call_id": "0", "tool_name": NAME, "parameters": {...}}`:
Command R7B and A between `<|START_ACTION|>` and `<|END_ACTION|>`, Command R, without identifiers,
in a block of Markdown behind `Action:`. As vLLM's tool parser cohere_command3, which is Cohere's
own (github.com/cohere-ai/melody), reads them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from itertools import product

from .marked_calls import Found, MarkedForm

_START_ACTION = "<|START_ACTION|>"
_ACTIONS = re.compile(r"\[\s*+(?=\{)|(?=\{)")  # a list, or one call alone
_NEXT_ACTION = re.compile(r"\s*+,\s*+(?=\{)")
_ACTION_END = re.compile(r"\s*+(?:(?:<\|END_ACTION\|>|```)\s*+)?")
_ACTIONS_END = re.compile(r"\s*+\]" + _ACTION_END.pattern)
# From actions that cannot be read to their end, which is not in quotes.
_ACTIONS_UNREAD = re.compile(
    r'(?:[^"<`]++|"(?:\\.|[^"\\])*+(?:"|\Z)|.)*?(?:<\|END_ACTION\|>|```|\Z)', re.DOTALL
)


class _Actions(MarkedForm):
    """Cohere's form: `head` is before a list of calls, `read` reads one of them with its name."""

    def calls(self, text: str, names: Iterable[str]) -> Iterator[Found]:
        """Calls in lists all of which are calls of functions of these names, in order."""
        head, known, at = re.compile(self.head("")), set(names), 0
        while match := head.search(text, at):
            try:
                found = self._list(text, match, known)
            except (ValueError, RecursionError):
                unread = _ACTIONS_UNREAD.match(text, match.end())
                assert unread is not None
                at = unread.end()
            else:
                yield from found
                at = found[-1].end

    def _list(self, text: str, head: re.Match[str], known: set[str]) -> list[Found]:
        """The calls behind a head, next to each other. Raises ValueError and RecursionError."""
        begun = _ACTIONS.match(text, head.end())
        if begun is None:
            raise ValueError("a call is missing")
        ends = _ACTIONS_END if begun[0] else _ACTION_END
        start, at, found = head.start(), begun.end(), list[Found]()
        while True:
            said, at = self.read(text, at)
            name, arguments = said.get("tool_name"), said.get("parameters")
            if not (isinstance(name, str) and name in known and isinstance(arguments, dict)):
                raise ValueError("this is no call of a known function")
            more = _NEXT_ACTION.match(text, at) if begun[0] else None
            end = more or ends.match(text, at)
            if end is None:
                raise ValueError("] is missing")
            number = said.get("tool_call_id")
            number = number if isinstance(number, str) else ""
            found.append(Found(name, arguments, start, end.end(), number))
            if more is None:
                return found
            start = at = end.end()


def _begins(*heads: str) -> list[str]:
    """What lists of calls begin with, where the tokenizer shows marks, or hides them."""
    spaces = product(
        ("", "\n", "\n  ", "\n    "), ("", "\n        "), ("tool_call_id", "tool_name")
    )
    return [*heads, *(f'[{before}{{{within}"{key}"' for before, within, key in spaces)]


_OBJECT = json.JSONDecoder().raw_decode
COHERE = {
    "cohere": _Actions(
        (_START_ACTION,),
        lambda _: _begins(_START_ACTION),
        lambda _: re.escape(_START_ACTION) + r"\s*+",
        _OBJECT,
    ),
    "command-r": _Actions(
        ("title of the tool in the specification",),  # of its instructions how to write calls
        lambda _: [f"Action:{space}```json" for space in ("", " ", "\n")],
        lambda _: r"(?:^|(?<=\n))Action:\s*+```(?:json)?\s*+",
        _OBJECT,
    ),
}
