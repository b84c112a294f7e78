"""How models mark what they think, and readers that part it from what they say.

Most think first, between `<think>` and `</think>` or marks like these, before anything is said: a
mark elsewhere is text. Space around thinking belongs to neither, as for llama.cpp's server.
Cohere's (cmd3 and cmd4 of its own parser, github.com/cohere-ai/melody) think between
`<|START_THINKING|>` and `<|END_THINKING|>`, and say what is between `<|START_RESPONSE|>` and
`<|END_RESPONSE|>` (Command R7B and A), or `<|START_TEXT|>` and `<|END_TEXT|>`. Behind
`<|START_ACTION|>` are calls, which quote.
gpt-oss (harmony, github.com/openai/harmony) thinks in messages of the channel `analysis`; one with
a recipient is a call in any channel.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import NamedTuple


class Kind(Enum):
    """What a piece of an answer is."""

    THOUGHT = "thought"
    SAID = "said"
    NEITHER = "neither"  # marks and space between


class Piece(NamedTuple):
    """Marks in its text, as calls have them, are whole."""

    text: str
    kind: Kind


class Reader(ABC):
    """Tells what the pieces of an answer are as its text comes, with the marks in it."""

    def __init__(self, begun: bool) -> None:
        self._thinks, self._held = begun, ""

    def add(self, text: str, last: bool = False) -> list[Piece]:
        """What is certain with further text; what may be the start of a mark is held back.

        last: no more comes.
        """
        self._held, at, found = self._held + text, 0, list[Piece]()
        while at < len(self._held):
            new = [one for one in self._next(self._held, at, last) if one.text]
            if not new:
                break
            found += new
            at += sum(len(one.text) for one in new)
        self._held = self._held[at:]
        return found

    @abstractmethod
    def _next(self, text: str, at: int, last: bool) -> list[Piece]:
        """The next pieces of a text; empty ones where more is needed."""


class _Tags(Reader):
    """Thinking between two marks, before anything is said."""

    def __init__(self, begin: str, end: str, begun: bool) -> None:
        super().__init__(begun)
        self._begin, self._end, self._marks = begin, end, (begin, end)
        self._has_thought = begun
        self._inside = self._says = False  # thinking, or an answer, of which a sign has come

    def _next(self, text: str, at: int, last: bool) -> list[Piece]:
        if self._says:
            return [_certain(text, at, self._marks, last, Kind.SAID)]
        body = _after_space(text, at)
        if self._thinks:
            return self._thought(text, at, body, last)
        if text.startswith(self._begin, body):
            self._thinks = self._has_thought = True
            return [Piece(text[at : body + len(self._begin)], Kind.NEITHER)]
        if not last and self._begin.startswith(text[body : body + len(self._begin)]):
            return []
        self._says = True
        space = Kind.NEITHER if self._has_thought else Kind.SAID
        return [Piece(text[at:body], space), _certain(text, body, self._marks, last, Kind.SAID)]

    def _thought(self, text: str, at: int, body: int, last: bool) -> list[Piece]:
        end = text.find(self._end, at)
        stop = end if end >= 0 else len(text) - (0 if last else overlap(text, self._marks))
        start = at if self._inside else min(body, stop)
        until = stop
        while until > start and text[until - 1].isspace():
            until -= 1
        self._inside = self._inside or until > start
        found = [Piece(text[at:start], Kind.NEITHER), Piece(text[start:until], Kind.THOUGHT)]
        if end >= 0:
            self._thinks = self._inside = False
            found.append(Piece(text[until : end + len(self._end)], Kind.NEITHER))
        elif last:
            found.append(Piece(text[until:], Kind.NEITHER))
        return found


_BEGIN, _ACTION = "<|START_THINKING|>", "<|START_ACTION|>"
_COHERE = (_BEGIN, "<|END_THINKING|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>",
           "<|START_TEXT|>", "<|END_TEXT|>", _ACTION)  # fmt: skip
_COHERE_MARK = re.compile("|".join(map(re.escape, _COHERE)))


class _Cohere(Reader):
    _calls = False

    def _next(self, text: str, at: int, last: bool) -> list[Piece]:
        mark, kind = _COHERE_MARK.search(text, at), _kind(self._thinks)
        if mark is None:
            return [_certain(text, at, _COHERE, last, kind)]
        self._calls = self._calls or mark[0] == _ACTION
        self._thinks = mark[0] == _BEGIN and not self._calls
        marks = Kind.SAID if self._calls else Kind.NEITHER
        return [Piece(text[at : mark.start()], kind), Piece(mark[0], marks)]


_CHANNEL, _MESSAGE = "<|channel|>", "<|message|>"
_ENDS = ("<|start|>", "<|end|>", "<|return|>", "<|call|>", _CHANNEL)
_HARMONY = (_CHANNEL, _MESSAGE, "<|constrain|>", *_ENDS[:-1])
_END = re.compile("|".join(map(re.escape, _ENDS)))
_HEADERS = ("<|start|>", _CHANNEL, "to=")  # what they begin with


class _Harmony(Reader):
    """Messages: a header, which ends with `<|message|>`, and a text."""

    def __init__(self, begun: bool) -> None:
        super().__init__(begun)
        self._in_text, self._calls = begun, False

    def _next(self, text: str, at: int, last: bool) -> list[Piece]:
        return (self._text if self._in_text else self._header)(text, at, last)

    def _header(self, text: str, at: int, last: bool) -> list[Piece]:
        body = _after_space(text, at)
        if not text.startswith(_HEADERS, body):
            if not last and overlap(text[body : body + 16], _HEADERS) == len(text) - body:
                return []
            self._in_text = True  # the prompt had the header
            return self._text(text, at, last)
        end = text.find(_MESSAGE, body)
        if end < 0:
            kind = Kind.SAID if text.startswith("to=", body) else Kind.NEITHER
            return [Piece(text[at:], kind)] if last else []
        end += len(_MESSAGE)
        header = text[body:end]
        self._in_text, self._calls = True, "to=" in header
        self._thinks = "analysis" in header and not self._calls
        kind = Kind.SAID if self._calls else Kind.NEITHER
        return [Piece(text[at:body], Kind.NEITHER), Piece(header, kind)]

    def _text(self, text: str, at: int, last: bool) -> list[Piece]:
        mark, kind = _END.search(text, at), _kind(self._thinks)
        if mark is None:
            return [_certain(text, at, _ENDS, last, kind)]
        before, calls = Piece(text[at : mark.start()], kind), self._calls
        self._in_text = self._thinks = self._calls = False
        if mark[0] in ("<|start|>", _CHANNEL):  # the next header's
            return [before] if before.text else self._header(text, at, last)
        return [before, Piece(mark[0], Kind.SAID if calls else Kind.NEITHER)]


@dataclass(frozen=True)
class Style:
    """A way to mark thinking.

    template: texts, one of which is in the chat template. begin, end: what thinking is between.
    more: what a prompt may have behind `begin`. marks: all that its readers need to see. reader:
    makes one, told whether an answer begins with thinking.
    """

    template: tuple[str, ...]
    begin: str
    end: str
    marks: tuple[str, ...]
    reader: Callable[[bool], Reader]
    more: str = ""

    def begun(self, prompt: str) -> bool:
        """Whether an answer to a prompt begins with thinking."""
        return prompt.rstrip().endswith((self.begin, self.begin + self.more))


def _tags(begin: str, end: str, more: str = "") -> Style:
    return Style((begin, end), begin, end, (begin, end), partial(_Tags, begin, end), more)


STYLES = (
    Style(_COHERE[:-1], _BEGIN, _COHERE[1], _COHERE, _Cohere),
    Style((_CHANNEL,), f"{_CHANNEL}analysis{_MESSAGE}", "<|end|>", _HARMONY, _Harmony),
    _tags("[THINK]", "[/THINK]"),  # Magistral
    _tags("<seed:think>", "</seed:think>", "<seed:cot_budget_reflect>"),  # Seed-OSS
    _tags("<think>", "</think>"),
)


def overlap(text: str, others: Iterable[str]) -> int:
    """How many characters at the end of a text one of others may begin with."""
    return max((_overlap(text, other) for other in others), default=0)


def _overlap(text: str, other: str) -> int:
    most = min(len(text), len(other) - 1)
    return next((n for n in range(most, 0, -1) if text.endswith(other[:n])), 0)


def _certain(text: str, at: int, marks: Iterable[str], last: bool, kind: Kind) -> Piece:
    """What of a text without marks is none."""
    return Piece(text[at : len(text) - (0 if last else overlap(text, marks))], kind)


def _kind(thinks: bool) -> Kind:
    return Kind.THOUGHT if thinks else Kind.SAID


def _after_space(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at
