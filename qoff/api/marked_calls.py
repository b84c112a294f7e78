"""Calls of functions between special tokens, which texts of answers leave out.

gpt-oss's (harmony, github.com/openai/harmony): `<|channel|>commentary to=functions.NAME
<|constrain|>json<|message|>{...}<|call|>`, or the recipient behind the role, before the channel: it
is in the header of a message, and a message's text is no header.
Gemma's: `<start_function_call>call:NAME{key:<escape>text<escape>,other:1}<end_function_call>`, and
with `<|tool_call>`, `<tool_call|>` and `<|"|>` for its marks in Gemma 4. Calls are read in texts
with special tokens, and content is what the text without these has beside them. What is within a
call, or within what begins as one, is never another call: models quote what they were given.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

_QUOTES = ("<escape>", '<|"|>', '"')
_SPACE = re.compile(r"\s*")
_KEY = re.compile(r"\s*([^\s:{}\[\],]+)\s*:\s*")
_LITERAL = re.compile(r"[^,{}\[\]]*")
_MARK = re.compile(r"<[^<>\s]+>")  # what may be a special token
_CLOSE = r"<end_function_call>|<tool_call\|>|<\|call\|>"
_CLOSED = re.compile(rf"(?:{_CLOSE})?\s*")
# From a call that cannot be read to its end, which is not in quotes.
_UNREAD = re.compile(
    r'(?:[^"<\\]+|\\.|(<escape>|<\|"\|>|")(?:\\.|.)*?(?:\1|\Z)|.)*?'
    rf"(?:{_CLOSE}|<\|end\|>|\Z)",
    re.DOTALL,
)


class Found(NamedTuple):
    """A call: the function's name, its arguments, and from where to where it is in the text."""

    name: str
    arguments: dict[str, Any]
    start: int
    end: int


@dataclass(frozen=True)
class MarkedForm:
    """A way to write calls.

    template: texts, one of which is in the chat template. begins: what a call begins with in a text
    without special tokens, or with them where the tokenizer shows these. head: a pattern of what is
    before arguments, whose group is the name, by one of names. read: the arguments at a place, and
    where they end; raises ValueError and RecursionError.
    """

    template: Sequence[str]
    begins: Callable[[Iterable[str]], list[str]]
    head: Callable[[str], str]
    read: Callable[[str, int], tuple[dict[str, Any], int]]

    def calls(self, text: str, names: Iterable[str]) -> Iterator[Found]:
        """Calls of functions of these names in a text with special tokens, in order."""
        head = re.compile(self.head("|".join(map(re.escape, sorted(names, key=len, reverse=True)))))
        at = 0
        while match := head.search(text, at):
            try:
                arguments, at = self.read(text, match.end())
            except (ValueError, RecursionError):
                at = _end(_UNREAD, text, match.end())
            else:
                at = _end(_CLOSED, text, at)
                yield Found(match[1], arguments, match.start(), at)


def beside(calls: Sequence[Found], text: str, said: str) -> str:
    """What an answer `text` says beside its calls, which are in `said`, with special tokens."""
    kept, before, end = list[str](), 0, 0
    for call in calls:
        start = _shown(said[before : call.start], text, end)
        kept.append(text[end : _after(text, start)])  # streams have shown the space
        before, end = call.end, _shown(said[call.start : call.end], text, start)
    return "".join([*kept, text[end:]])


def _shown(said: str, text: str, at: int) -> int:
    """Where `said`, with special tokens, ends in a text that may lack them, and has it `at`."""
    after = 0
    for mark in _MARK.finditer(said):
        at += mark.start() - after
        after = mark.end()
        at += len(mark[0]) if text.startswith(mark[0], at) else 0
    return at + len(said) - after


def _harmony(names: str) -> str:
    heads = "|".join(map(re.escape, _harmony_begins(())))
    return (
        # What has taken space never gives it back: so a text of spaces takes no time by its cube.
        rf"(?:(?=<\|start\|>)|\A\s*)(?:{heads})({names})\s*+"
        r"(?:<\|channel\|>\s*+(?:commentary|analysis)\s*+)?"
        r"(?:<\|constrain\|>)?\s*+(?:json|code)?\s*+<\|message\|>\s*+(?=\{)"
    )


def _harmony_begins(_: Iterable[str]) -> list[str]:
    ways = ("commentary to=functions.", "analysis to=functions.", "to=functions.")
    heads = ("<|start|>assistant<|channel|>", "<|channel|>", "assistant<|channel|>", "assistant")
    both = [f"{head}{way}" for head in heads for way in ways[:2]]
    return [*both, "<|start|>assistant to=functions.", "assistant to=functions.", *ways]


def _gemma(names: str) -> str:
    return rf"(?:<start_function_call>|<\|tool_call>)\s*call:({names})(?=\{{)"


def _gemma_begins(names: Iterable[str]) -> list[str]:
    return ["<start_function_call>", "<|tool_call>", *(f"call:{name}{{" for name in names)]


def _object(text: str, at: int) -> tuple[dict[str, Any], int]:
    """The object that begins at a brace, and where it ends. Raises ValueError."""
    found: dict[str, Any] = {}
    at = _after(text, at + 1)
    while not text.startswith("}", at):
        key = _KEY.match(text, at)
        if key is None:
            raise ValueError("a key is missing")
        found[key[1].strip('"')], at = _value(text, key.end())
        at = _next(text, at, "}")
    return found, at + 1


def _value(text: str, at: int) -> tuple[Any, int]:
    for quote in _QUOTES:
        if text.startswith(quote, at):
            end = text.index(quote, at + len(quote))
            return text[at + len(quote) : end], end + len(quote)
    if text.startswith("{", at):
        return _object(text, at)
    if text.startswith("[", at):
        found, at = list[Any](), _after(text, at + 1)
        while not text.startswith("]", at):
            one, at = _value(text, at)
            found.append(one)
            at = _next(text, at, "]")
        return found, at + 1
    end = _end(_LITERAL, text, at)
    return json.loads(text[at:end]), end


def _next(text: str, at: int, close: str) -> int:
    """Where the next element begins, or the end is."""
    at = _after(text, at)
    if text.startswith(",", at):
        return _after(text, at + 1)
    if not text.startswith(close, at):
        raise ValueError(f"{close} is missing")
    return at


def _after(text: str, at: int) -> int:
    return _end(_SPACE, text, at)


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    """Where ends what a pattern matches that matches anywhere."""
    match = pattern.match(text, at)
    assert match is not None
    return match.end()


FORMS = {
    "harmony": MarkedForm(
        ("<|channel|>",), _harmony_begins, _harmony, json.JSONDecoder().raw_decode
    ),
    "gemma": MarkedForm(("<start_function_call>", "<|tool_call>"), _gemma_begins, _gemma, _object),
}


def form_of(template: str) -> str:
    """The form that a chat template has models write, "" for none of these."""
    for name, form in FORMS.items():
        if any(mark in template for mark in form.template):
            return name
    return ""
