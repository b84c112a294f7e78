"""An answer's text while its tokens come."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from transformers import PreTrainedTokenizerBase

from qoff.api.thinking import Thinking
from qoff.api.token_bytes import INCOMPLETE


class TextStream:
    """Text that will not change any more, from tokens as they come.

    Held back are characters whose bytes are not complete, what may be the start of one of `stops`,
    which end the answer, and what may be one of `begins`, with all that comes after it.
    decode: what makes text of tokens; None: the tokenizer, without special tokens.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stops: Sequence[str],
        begins: Sequence[str] = (),
        decode: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        self._tokenizer, self._stops, self._begins = tokenizer, stops, begins
        self._own = decode
        self._tokens: list[int] = []
        self._start = self._end = 0  # tokens decoded again for the next ones; of which given
        self._held = ""
        self.sent = 0  # characters

    def add(self, tokens: Sequence[int], holds: Callable[[str], bool] = lambda _: False) -> str:
        """The text that further tokens have made certain, of an answer that goes on after them.

        So a stop text among it came too early to end the answer, and is given like any other text.
        holds: whether a text that an answer begins with is to be held back as a whole.
        """
        self._tokens += tokens
        before = self._decode(self._tokens[self._start : self._end])
        after = self._decode(self._tokens[self._start :])
        if after.endswith(INCOMPLETE) or len(after) <= len(before):
            return ""
        self._start, self._end = self._end, len(self._tokens)
        self._held += after[len(before) :]
        if not self.sent and holds(self._held):
            return ""
        held = max((_overlap(self._held, one) for one in (*self._stops, *self._begins)), default=0)
        begun = [at for one in self._begins if (at := self._held.find(one)) >= 0]
        certain = min([len(self._held) - held, *begun])
        text, self._held = self._held[:certain], self._held[certain:]
        self.sent += len(text)
        return text

    def finish(self, text: str) -> str:
        """The rest of an answer whose text is `text`."""
        rest, self.sent = text[self.sent :], max(self.sent, len(text))
        return rest

    def _decode(self, tokens: list[int]) -> str:
        if self._own is not None:
            return self._own(tokens)
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True)) if tokens else ""


class AnswerStream:
    """What an answer thinks and says while its tokens come. thinking: None where it has no marks.

    All is given in pairs: thinking, and the rest.
    """

    def __init__(self, text: TextStream, thinking: Thinking | None) -> None:
        self._text, self._thinking = text, thinking

    def add(self, tokens: Sequence[int], holds: Callable[[str], bool]) -> tuple[str, str]:
        """As `TextStream.add`."""
        new = self._text.add(tokens, holds)
        return ("", new) if self._thinking is None else self._thinking.add(new)

    def finish(self, thinking: str, text: str) -> tuple[str, str]:
        """The rest of an answer that thinks and says this as a whole."""
        if self._thinking is None:
            return "", self._text.finish(text)
        return self._thinking.finish(thinking, text)


def _overlap(text: str, other: str) -> int:
    """How many characters at the end of a text another one may begin with."""
    most = min(len(text), len(other) - 1)
    return next((n for n in range(most, 0, -1) if text.endswith(other[:n])), 0)
