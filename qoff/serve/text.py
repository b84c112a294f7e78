"""An answer's text while its tokens come."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from transformers import PreTrainedTokenizerBase

from qoff.api.thinking import Thinking
from qoff.api.thinking_marks import overlap
from qoff.api.token_bytes import INCOMPLETE


class TextStream:
    """Text that will not change any more, from tokens as they come.

    Held back are characters whose bytes are not complete, and what may be the start of one of
    `stops`, which end the answer. decode: what makes text of tokens; None: the tokenizer, without
    special tokens.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stops: Sequence[str],
        decode: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        self._tokenizer, self._stops, self._own = tokenizer, stops, decode
        self._tokens: list[int] = []
        self._start = self._end = 0  # tokens decoded again for the next ones; of which given
        self._held = ""
        self._sent = 0  # characters

    def add(self, tokens: Sequence[int]) -> str:
        """The text that further tokens have made certain, of an answer that goes on after them.

        So a stop text among it came too early to end the answer, and is given like any other text.
        """
        self._tokens += tokens
        before = self._decode(self._tokens[self._start : self._end])
        after = self._decode(self._tokens[self._start :])
        if after.endswith(INCOMPLETE) or len(after) <= len(before):
            return ""
        self._start, self._end = self._end, len(self._tokens)
        self._held += after[len(before) :]
        certain = len(self._held) - overlap(self._held, self._stops)
        text, self._held = self._held[:certain], self._held[certain:]
        self._sent += len(text)
        return text

    def finish(self, text: str) -> str:
        """The rest of an answer whose text is `text`."""
        return text[self._sent :]

    def _decode(self, tokens: list[int]) -> str:
        if self._own is not None:
            return self._own(tokens)
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True)) if tokens else ""


class AnswerStream:
    """What an answer thinks and says while its tokens come.

    Held back of what it says is what may be one of `begins`, with all that comes after it. All is
    given in pairs: thinking, and the rest.
    """

    def __init__(self, text: TextStream, thinking: Thinking, begins: Sequence[str] = ()) -> None:
        self._text, self._thinking, self._begins = text, thinking, begins
        self._held = ""
        self._thought = self._said = 0  # characters that were given

    def add(
        self, tokens: Sequence[int], holds: Callable[[str], bool] = lambda _: False
    ) -> tuple[str, str]:
        """As `TextStream.add`. holds: whether what an answer begins to say is held back whole."""
        thought, new = self._thinking.add(self._text.add(tokens))
        self._held += new
        self._thought += len(thought)
        if not self._said and holds(self._held):
            return thought, ""
        begun = [at for one in self._begins if (at := self._held.find(one)) >= 0]
        certain = min([len(self._held) - overlap(self._held, self._begins), *begun])
        text, self._held = self._held[:certain], self._held[certain:]
        self._said += len(text)
        return thought, text

    def finish(self, thinking: str, text: str) -> tuple[str, str]:
        """The rest of an answer that thinks and says this as a whole."""
        return thinking[self._thought :], text[self._said :]
