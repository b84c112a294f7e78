"""The bytes of tokens: one alone may be a part of a character, which is no text."""

from __future__ import annotations

import codecs
import re
from collections.abc import Collection, Sequence

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

INCOMPLETE = "\ufffd"  # what a part of a character is decoded to
_SPACE = "\u2581"  # SentencePiece's
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_BYTES = {sign: byte for byte, sign in bytes_to_unicode().items()}  # GPT-2's alphabet


class TokenBytes:
    """Those of a tokenizer. Each token is decoded once."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, bytes]] = {}
        self._special: dict[int, bool] = {}

    def text(self, token: int) -> str:
        """What the tokenizer makes of it at the beginning of a text."""
        return self._of(token)[0]

    def within(self, token: int) -> bytes:
        """Its bytes within a text; at the beginning, SentencePiece's tokenizers drop a space."""
        return self._of(token)[1]

    def first(self, token: int) -> bytes:
        """Its bytes at the beginning of a text."""
        text, found = self._of(token)
        return found if INCOMPLETE in text else text.encode()

    def is_special(self, token: int) -> bool:
        """Whether the text of an answer is without it."""
        if token not in self._special:
            text = self._tokenizer.decode([token], skip_special_tokens=True)
            self._special[token] = text == "" != self.text(token)
        return self._special[token]

    def with_marks(self, tokens: Sequence[int], marks: Collection[str]) -> str:
        """The text of tokens with marks, but no other special tokens."""
        kept = [one for one in tokens if self.text(one) in marks or not self.is_special(one)]
        return str(self._tokenizer.decode(kept))

    def _of(self, token: int) -> tuple[str, bytes]:
        if token not in self._known:
            text = str(self._tokenizer.decode([token]))
            piece = self._tokenizer.convert_ids_to_tokens(token)
            self._known[token] = text, _bytes(text, piece if isinstance(piece, str) else "")
        return self._known[token]


class Place:
    """Where a token begins in the text that tokens make together.

    text: theirs, where it may have special tokens: those that it has count.
    """

    def __init__(self, tokens: TokenBytes, text: str = "") -> None:
        self._tokens, self._begun, self._at = tokens, False, 0
        self._text = text
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int) -> int:
        """Where the next token begins; one within a character, where that begins."""
        tokens, at = self._tokens, self._at
        if tokens.is_special(token) and not self._text.startswith(tokens.text(token), at):
            return at
        found = tokens.within if self._begun else tokens.first
        self._begun = True
        self._at += len(self._decoder.decode(found(token)))
        return at


def _bytes(text: str, piece: str) -> bytes:
    """Of a token that is decoded to a text, and that the vocabulary has as `piece`."""
    if INCOMPLETE not in text:
        spaces = len(piece) - len(piece.lstrip(_SPACE))
        return (" " * spaces + text.lstrip(" ") if spaces else text).encode()
    if match := _BYTE.fullmatch(piece):
        return bytes([int(match[1], 16)])
    known = [_BYTES[sign] for sign in piece if sign in _BYTES]
    return bytes(known) if len(known) == len(piece) > 0 else text.encode()
