"""OpenAI's documents of chat and text completions, whole and in pieces."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from qoff.engine import Logprob

from .token_bytes import Place, TokenBytes


class Form:
    """What all documents of a request have in common. kind: "chat" or "text"."""

    def __init__(
        self,
        kind: str,
        model: str,
        tokenizer: PreTrainedTokenizerBase,
        logprobs: int | None,
    ) -> None:
        self._chat, self.tokenizer, self._shown = kind == "chat", tokenizer, logprobs
        self.id = f"{'chatcmpl' if self._chat else 'cmpl'}-{secrets.token_hex(12)}"
        self._head = {"id": self.id, "created": int(time.time()), "model": model}
        self._bytes = TokenBytes(tokenizer)

    def marked(self, tokens: Sequence[int]) -> str:
        """The text of tokens with the special ones among them."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=False))

    def with_marks(self, tokens: Sequence[int], marks: Collection[str]) -> str:
        """The text of tokens with some of the special ones, as `TokenBytes.with_marks`."""
        return self._bytes.with_marks(tokens, marks)

    def shows(self, mark: str) -> bool:
        """Whether texts of answers have a mark."""
        ids = self.tokenizer.encode(mark, add_special_tokens=False)
        return mark in self.tokenizer.decode(ids, skip_special_tokens=True)

    def whole(self, choices: list[dict[str, Any]], usage: dict[str, int]) -> dict[str, Any]:
        """The document of complete answers."""
        kind = "chat.completion" if self._chat else "text_completion"
        return {**self._head, "object": kind, "choices": choices, "usage": usage}

    def chunk(
        self, choices: list[dict[str, Any]], usage: dict[str, int] | None = None
    ) -> dict[str, Any]:
        """A document of a stream."""
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        found = {**self._head, "object": kind, "choices": choices}
        return found if usage is None else {**found, "usage": usage}

    def choice(
        self,
        index: int,
        text: str,
        reason: str | None,
        logprobs: dict[str, Any] | None,
        tools: list[dict[str, Any]],
        thinking: str = "",
    ) -> dict[str, Any]:
        """One complete answer."""
        what: dict[str, Any] = {"text": text}
        if self._chat:
            content = None if tools and not text else text
            what = {"message": {"role": "assistant", "content": content, "refusal": None}}
            if thinking:
                what["message"]["reasoning_content"] = thinking
            if tools:
                what["message"]["tool_calls"] = tools
        return {"index": index, **what, "logprobs": logprobs, "finish_reason": reason}

    def delta(
        self,
        index: int,
        text: str,
        first: bool,
        reason: str | None,
        logprobs: dict[str, Any] | None,
        tools: list[dict[str, Any]],
        thinking: str = "",
    ) -> dict[str, Any]:
        """What is new of one answer."""
        what: dict[str, Any] = {"text": text}
        if self._chat:
            what = {"delta": {"role": "assistant"} if first else {}}
            if text or first:
                what["delta"]["content"] = text
            if thinking:
                what["delta"]["reasoning_content"] = thinking
            if tools:
                calls = [{"index": i, **tool} for i, tool in enumerate(tools)]
                what["delta"]["tool_calls"] = calls
        return {"index": index, **what, "logprobs": logprobs, "finish_reason": reason}

    def place(self) -> Place:
        """Where a text begins."""
        return Place(self._bytes)

    def logprobs(
        self,
        tokens: Sequence[int],
        steps: Sequence[Mapping[int, Logprob]],
        place: Place | None = None,
    ) -> dict[str, Any] | None:
        """Log-probabilities of some tokens, where asked for; place: where these begin."""
        if self._shown is None:
            return None
        pairs = list(zip(tokens, steps, strict=True))
        if self._chat:
            return {
                "content": [
                    {
                        **self._entry(token, step[token]),
                        "top_logprobs": [self._entry(one, step[one]) for one in self._top(step)],
                    }
                    for token, step in pairs
                ],
                "refusal": None,
            }
        place = place or self.place()
        return {
            "tokens": [self._token(token) for token in tokens],
            "token_logprobs": [step[token].logprob for token, step in pairs],
            "top_logprobs": [self._likeliest(step) for step in steps],
            "text_offset": [place.add(token) for token in tokens],
        }

    def echoed(
        self,
        tokens: Sequence[int],
        steps: Sequence[Mapping[int, Logprob] | None] | None,
        own: dict[str, Any] | None,
        text: str,
    ) -> dict[str, Any] | None:
        """Log-probabilities of a prompt's tokens, the first of which has none, before `own`.

        text: the prompt's, as it is echoed.
        """
        if own is None or steps is None:
            return own
        place = Place(self._bytes, text)
        at = place.add(tokens[0])
        found = self.logprobs(tokens[1:], [one for one in steps[1:] if one is not None], place)
        assert found is not None
        found = {name: [None, *values] for name, values in found.items()}
        found["tokens"][0], found["text_offset"][0] = self._token(tokens[0]), at
        end = len(text)
        own = {**own, "text_offset": [end + at for at in own["text_offset"]]}
        return {name: [*values, *own[name]] for name, values in found.items()}

    def prompt_logprobs(
        self, steps: Sequence[Mapping[int, Logprob] | None]
    ) -> list[dict[str, Any] | None]:
        """Those of a prompt's tokens, by their ids, as in vLLM."""
        return [
            None
            if step is None
            else {
                str(token): {
                    "logprob": one.logprob,
                    "rank": one.rank,
                    "decoded_token": self._bytes.text(token),
                }
                for token, one in step.items()
            }
            for step in steps
        ]

    def text_of(self, tokens: Sequence[int], text: str | None) -> str:
        """A prompt as it was given, or what its tokens say."""
        return str(self.tokenizer.decode(list(tokens))) if text is None else text

    def _top(self, step: Mapping[int, Logprob]) -> list[int]:
        """The likeliest tokens, as many as were asked for."""
        most = self._shown or 0
        best = sorted((one.rank, token) for token, one in step.items() if one.rank <= most)
        return [token for _, token in best]

    def _likeliest(self, step: Mapping[int, Logprob]) -> dict[str, float]:
        """Their log-probabilities by their texts: of those with one text, the likeliest one's."""
        found: dict[str, float] = {}
        for token in self._top(step):
            found.setdefault(self._token(token), step[token].logprob)
        return found

    def _token(self, token: int) -> str:
        """What a text completion has of a token; as OpenAI, of a part of a character its bytes."""
        known = self._bytes.within(token)
        try:
            return known.decode()
        except UnicodeDecodeError:
            return f"bytes:{known.decode(errors='backslashreplace')}"

    def _entry(self, token: int, one: Logprob) -> dict[str, Any]:
        """What a chat has of a token."""
        known = self._bytes.within(token)
        text = known.decode(errors="backslashreplace")
        return {"token": text, "logprob": one.logprob, "bytes": list(known)}


def usage(prompt_tokens: int, new_tokens: int) -> dict[str, int]:
    """What a request has cost."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": new_tokens,
        "total_tokens": prompt_tokens + new_tokens,
    }


def encoded(document: Any) -> bytes:
    """As JSON; what is no character stays as an escape."""
    return json.dumps(document, separators=(",", ":")).encode()


# The last event of a stream, behind that of an error, too: some clients wait for it.
DONE = b"data: [DONE]\n\n"


def event(document: Any) -> bytes:
    """As a server-sent event."""
    return b"data: " + encoded(document) + b"\n\n"
