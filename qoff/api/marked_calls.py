"""Calls of functions between special tokens, which texts of answers leave out.

gpt-oss's (harmony, github.com/openai/harmony): `<|channel|>commentary to=functions.NAME
<|constrain|>json<|message|>{...}<|call|>`, or the recipient behind the role, before the channel: it
is in the header of a message, and a message's text is no header.
Gemma's: `<start_function_call>call:NAME{key:<escape>text<escape>,other:1}<end_function_call>`, and
with `<|tool_call>`, `<tool_call|>` and `<|"|>` for its marks in Gemma 4.
DeepSeek's, whose marks have wide bars: `<|tool_call_begin|>NAME<|tool_sep|>{...}<|tool_call_end|>`
in V3.1; in V3 and R1 `function<|tool_sep|>NAME`, and the arguments in a block of Markdown.
Kimi K2's: `<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`,
where `functions.NAME:0` is the call's identifier. Both are in a section. Calls are read in texts
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
_MARK = re.compile(r"<[^<>\[\]\s]+>|\[/?[A-Z_]+\]")  # what may be a special token
_CALLS, _CALLS_END, _BEGIN, _END, _SEP = (  # DeepSeek's
    f"<\uff5ctool▁{name}\uff5c>"
    for name in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")
)
_CLOSE = rf"<end_function_call>|<tool_call\|>|<\|call\|>|{_END}|<\|tool_call_end\|>"
_ALL_CLOSED = rf"{_CALLS_END}|<\|tool_calls?_section_end\|>"
_CLOSED = re.compile(rf"(?:\s*+(?:```\s*+)?(?:{_CLOSE})(?:\s*+(?:{_ALL_CLOSED}))?)?\s*")
# From a call that cannot be read to its end, which is not in quotes.
_UNREAD = re.compile(
    r'(?:[^"<\\]+|\\.|(<escape>|<\|"\|>|")(?:\\.|.)*?(?:\1|\Z)|.)*?'
    rf"(?:{_CLOSE}|<\|end\|>|\Z)",
    re.DOTALL,
)


class Found(NamedTuple):
    """A call: the function's name, its arguments, and from where to where it is in the text.

    number: its identifier, where the model writes one.
    """

    name: str
    arguments: dict[str, Any]
    start: int
    end: int
    number: str = ""


@dataclass(frozen=True)
class MarkedForm:
    """A way to write calls.

    template: texts, one of which is in the chat template. begins: what a call begins with in a text
    without special tokens, or with them where the tokenizer shows these. head: a pattern of what is
    before arguments, with a group `name`, of one of names, and maybe one `number`. read: the
    arguments at a place, and where they end; raises ValueError and RecursionError.
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
                said = match.groupdict()
                yield Found(said["name"], arguments, match.start(), at, said.get("number", ""))


def beside(calls: Sequence[Found], text: str, said: str) -> str:
    """What an answer `text` says beside its calls, which are in `said`, with special tokens."""
    kept, before, end = list[str](), 0, 0
    for call in calls:
        start = shown(said[before : call.start], text, end)
        kept.append(text[end : _after(text, start)])  # streams have shown the space
        before, end = call.end, shown(said[call.start : call.end], text, start)
    return "".join([*kept, text[end:]])


def shown(said: str, text: str, at: int) -> int:
    """Where `said`, with special tokens, ends in a text that may lack them, and has it `at`."""
    after = 0
    for mark in _MARK.finditer(said):
        at += mark.start() - after
        after = mark.end()
        at += len(mark[0]) if text.startswith(mark[0], at) else 0
    return at + len(said) - after


def behind(text: str, said: str, at: int) -> int:
    """Where a text ends in `said`, which has it `at`, with special tokens that it may lack.

    Such tokens before it count, those behind it do not.
    """
    done = 0  # characters of the text
    for mark in _MARK.finditer(said, at):
        before = mark.start() - at
        if done + before >= len(text):
            break
        done += before + (len(mark[0]) if text.startswith(mark[0], done + before) else 0)
        at = mark.end()
    return at + len(text) - done


def _harmony(names: str) -> str:
    heads = "|".join(map(re.escape, _harmony_begins(())))
    return (
        # What has taken space never gives it back: so a text of spaces takes no time by its cube.
        rf"(?:(?=<\|start\|>)|\A\s*)(?:{heads})(?P<name>{names})\s*+"
        r"(?:<\|channel\|>\s*+(?:commentary|analysis)\s*+)?"
        r"(?:<\|constrain\|>)?\s*+(?:json|code)?\s*+<\|message\|>\s*+(?=\{)"
    )


def _harmony_begins(_: Iterable[str]) -> list[str]:
    ways = ("commentary to=functions.", "analysis to=functions.", "to=functions.")
    heads = ("<|start|>assistant<|channel|>", "<|channel|>", "assistant<|channel|>", "assistant")
    both = [f"{head}{way}" for head in heads for way in ways[:2]]
    return [*both, "<|start|>assistant to=functions.", "assistant to=functions.", *ways]


def _gemma(names: str) -> str:
    return rf"(?:<start_function_call>|<\|tool_call>)\s*call:(?P<name>{names})(?=\{{)"


def _gemma_begins(names: Iterable[str]) -> list[str]:
    return ["<start_function_call>", "<|tool_call>", *(f"call:{name}{{" for name in names)]


def _deepseek(names: str) -> str:
    return (
        rf"(?:{_CALLS}\s*+)?{_BEGIN}(?:function{_SEP})?"
        rf"(?P<name>{names})(?:{_SEP}|\s*+```json)\s*+(?=\{{)"
    )


def _deepseek_begins(names: Iterable[str]) -> list[str]:
    hidden = [begun for name in names for begun in (f"{name}{{", f"function{name}\n```json")]
    return [_CALLS, _BEGIN, *hidden]


def _kimi(names: str) -> str:
    return (
        r"(?:<\|tool_calls?_section_begin\|>\s*+)?<\|tool_call_begin\|>\s*+"
        rf"(?P<number>(?:functions\.)?(?P<name>{names}):\d++)\s*+"
        r"<\|tool_call_argument_begin\|>\s*+(?=\{)"
    )


def _kimi_begins(names: Iterable[str]) -> list[str]:
    hidden = [begun for name in names for begun in (f"functions.{name}:", f"{name}:0")]
    sections = ["<|tool_calls_section_begin|>", "<|tool_call_section_begin|>"]
    return [*sections, "<|tool_call_begin|>", *hidden]


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


MARKED = {
    "harmony": MarkedForm(
        ("<|channel|>",), _harmony_begins, _harmony, json.JSONDecoder().raw_decode
    ),
    "gemma": MarkedForm(("<start_function_call>", "<|tool_call>"), _gemma_begins, _gemma, _object),
    "deepseek": MarkedForm((_CALLS,), _deepseek_begins, _deepseek, json.JSONDecoder().raw_decode),
    "kimi": MarkedForm(
        ("<|tool_calls_section_begin|>",), _kimi_begins, _kimi, json.JSONDecoder().raw_decode
    ),
}
