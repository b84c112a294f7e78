"""An answer's text while its tokens come."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from transformers import PreTrainedTokenizerBase

_INCOMPLETE = "\ufffd"  # what a part of a character is decoded to


class TextStream:
    """Text that will not change any more, from tokens as they come.

    Held back are characters whose bytes are not complete, and what may be the start of a text that
    ends the answer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str]) -> None:
        self._tokenizer, self._stops = tokenizer, stops
        self._tokens: list[int] = []
        self._start = self._end = 0  # tokens decoded again for the next ones; of which given
        self._held = ""
        self.sent = 0  # characters

    def add(self, tokens: Sequence[int], holds: Callable[[str], bool] = lambda _: False) -> str:
        """The text that further tokens have made certain.

        holds: whether a text that an answer begins with is to be held back as a whole.
        """
        self._tokens += tokens
        before = self._decode(self._tokens[self._start : self._end])
        after = self._decode(self._tokens[self._start :])
        if after.endswith(_INCOMPLETE) or len(after) <= len(before):
            return ""
        self._start, self._end = self._end, len(self._tokens)
        self._held += after[len(before) :]
        if not self.sent and holds(self._held):
            return ""
        certain = len(self._held)
        for stop in self._stops:
            at = self._held.find(stop)
            start = len(self._held) - _overlap(self._held, stop) if at < 0 else at
            certain = min(certain, start)
        text, self._held = self._held[:certain], self._held[certain:]
        self.sent += len(text)
        return text

    def finish(self, text: str) -> str:
        """The rest of an answer whose text is `text`."""
        rest, self.sent = text[self.sent :], max(self.sent, len(text))
        return rest

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True)) if tokens else ""


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of a text a stop text may begin with."""
    most = min(len(text), len(stop) - 1)
    return next((n for n in range(most, 0, -1) if text.endswith(stop[:n])), 0)
