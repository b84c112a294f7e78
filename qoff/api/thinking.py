"""Thinking, which is apart from what an answer says: OpenAI's documents have it as a field.

Cohere's models write it between `<|START_THINKING|>` and `<|END_THINKING|>`. What they say is
between `<|START_RESPONSE|>` and `<|END_RESPONSE|>` (Command R7B and A), or `<|START_TEXT|>` and
`<|END_TEXT|>`, where a prompt may end with `<|START_THINKING|>`. As cmd3 and cmd4 of Cohere's own
parser (github.com/cohere-ai/melody) read them. Behind `<|START_ACTION|>` are calls, which quote.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from .marked_calls import shown

BEGIN = "<|START_THINKING|>"
ACTION = "<|START_ACTION|>"
MARKS = (BEGIN, "<|END_THINKING|>",
         "<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")  # fmt: skip
_MARK = re.compile("|".join(map(re.escape, (*MARKS, ACTION))))


def may_think(templates: object) -> bool:
    """Whether a tokenizer's chat template, or one of several, has these marks."""
    text = str(templates)
    return any(mark in text for mark in MARKS)


class Thinking:
    """Tells thinking from the rest of an answer as its text comes, with the marks in it.

    begun: whether the answer begins with thinking. keeps: whether marks of and in calls are text;
    else they are left out. Held back is what may be the start of a mark.
    """

    def __init__(self, begun: bool, keeps: bool) -> None:
        self._thinks, self._calls, self._held, self._keeps = begun, False, "", keeps
        self._sent = [0, 0]  # characters: said, thought

    def add(self, text: str) -> tuple[str, str]:
        """What further text has of thinking, and of the rest."""
        self._held += text
        parts, at = ["", ""], 0
        while mark := _MARK.search(self._held, at):
            parts[self._thinks] += self._held[at : mark.start()]
            self._calls = self._calls or mark[0] == ACTION
            self._thinks = mark[0] == BEGIN and not self._calls
            parts[0] += mark[0] if self._calls and self._keeps else ""
            at = mark.end()
        left = self._held[at:]
        certain = len(left) - _begun(left)
        parts[self._thinks] += left[:certain]
        self._held = left[certain:]
        self._sent = [sent + len(part) for sent, part in zip(self._sent, parts, strict=True)]
        return parts[1], parts[0]

    def finish(self, thinking: str, text: str) -> tuple[str, str]:
        """The rest of an answer that has this thinking, and says this."""
        return thinking[self._sent[1] :], text[self._sent[0] :]


def parted(text: str, said: str, begun: bool) -> tuple[str, str, str]:
    """The thinking in an answer `text`, and what is beside it in `text` and in `said`.

    said: the answer with special tokens, which `text` may lack. begun: it begins with thinking.
    """
    thinking, rest, rest_said = list[str](), list[str](), list[str]()
    before = at = 0
    for start, end, thinks in _spans(said, begun):
        first = shown(said[before:start], text, at)
        before, at = end, shown(said[start:end], text, first)
        (thinking if thinks else rest).append(text[first:at])
        if not thinks:
            rest_said.append(said[start:end])
    rest.append(text[at:])  # where the texts differ otherwise, nothing is lost
    return "".join(thinking), "".join(rest), "".join(rest_said)


def _spans(said: str, thinks: bool) -> Iterator[tuple[int, int, bool]]:
    """From where to where is what, without marks."""
    at = 0
    for mark in _MARK.finditer(said):
        if mark[0] == ACTION:
            yield at, mark.start(), thinks
            at, thinks = mark.start(), False
            break
        yield at, mark.start(), thinks
        at, thinks = mark.end(), mark[0] == BEGIN
    yield at, len(said), thinks


def _begun(text: str) -> int:
    """How many characters at the end of a text a mark may begin with."""
    at = text.rfind("<")
    begun = at >= 0 and any(mark.startswith(text[at:]) for mark in (*MARKS, ACTION))
    return len(text) - at if begun else 0
