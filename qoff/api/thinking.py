"""Thinking, which is apart from what an answer says: OpenAI's documents have it as a field."""

from __future__ import annotations

from .marked_calls import behind, shown
from .thinking_marks import STYLES, Kind, Piece, Style


def style_of(templates: object) -> Style | None:
    """How a tokenizer's chat template, or one of several, has models mark what they think."""
    text = str(templates)
    return next((one for one in STYLES if any(mark in text for mark in one.template)), None)


class Thinking:
    """Tells thinking from the rest of an answer as its text comes, with the marks in it.

    style: None where it has none. begun: whether the answer begins with thinking. keeps: whether
    marks that calls and quotes have are text; else they are left out. Held back is what may be the
    start of a mark.
    """

    def __init__(self, style: Style | None, begun: bool, keeps: bool) -> None:
        self._reader = None if style is None else style.reader(begun)
        self._left_out = () if style is None or keeps else style.marks

    def add(self, text: str, last: bool = False) -> tuple[str, str]:
        """What further text has of thinking, and of the rest. last: no more comes."""
        if self._reader is None:
            return "", text
        found = dict.fromkeys(Kind, "")
        for piece in self._reader.add(text, last):
            found[piece.kind] += self._without(piece.text)
        return found[Kind.THOUGHT], found[Kind.SAID]

    def _without(self, text: str) -> str:
        for mark in self._left_out:
            text = text.replace(mark, "")
        return text


def parted(style: Style, begun: bool, text: str, marked: str, said: str) -> tuple[str, str, str]:
    """The thinking in an answer `text`, and what is beside it in `text` and in `said`.

    begun: it begins with thinking. marked: the answer with the style's marks; said: with all
    special tokens. `text` may lack both.
    """
    thinking = rest = rest_said = ""
    at = at_said = 0
    last = Piece("", Kind.SAID)
    for last in style.reader(begun).add(marked, last=True):
        start, start_said = at, at_said
        at, at_said = shown(last.text, text, at), behind(last.text, said, at_said)
        if last.kind is Kind.THOUGHT:
            thinking += text[start:at]
        elif last.kind is not Kind.NEITHER:
            rest += text[start:at]
            rest_said += said[start_said:at_said]
    left = text[at:]  # where the texts differ otherwise, nothing is lost
    if last.kind is Kind.THOUGHT:
        return thinking + left, rest, rest_said
    return thinking, rest + left, rest_said + said[at_said:]
