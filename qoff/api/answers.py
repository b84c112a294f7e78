"""OpenAI's documents of chat and text completions, whole and in pieces."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from qoff.engine import Logprob

_INCOMPLETE = "\ufffd"


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
        self._texts: dict[int, str] = {}  # of tokens that were decoded

    def marked(self, tokens: Sequence[int]) -> str:
        """The text of tokens with the special ones among them."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=False))

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
    ) -> dict[str, Any]:
        """One complete answer."""
        what: dict[str, Any] = {"text": text}
        if self._chat:
            content = None if tools and not text else text
            what = {"message": {"role": "assistant", "content": content, "refusal": None}}
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
    ) -> dict[str, Any]:
        """What is new of one answer."""
        what: dict[str, Any] = {"text": text}
        if self._chat:
            what = {"delta": {"role": "assistant"} if first else {}}
            if text or first:
                what["delta"]["content"] = text
            if tools:
                calls = [{"index": i, **tool} for i, tool in enumerate(tools)]
                what["delta"]["tool_calls"] = calls
        return {"index": index, **what, "logprobs": logprobs, "finish_reason": reason}

    def logprobs(
        self, tokens: Sequence[int], steps: Sequence[Mapping[int, Logprob]], offset: int = 0
    ) -> dict[str, Any] | None:
        """Log-probabilities of some tokens, where asked for; offset: of the text before them."""
        if self._shown is None:
            return None
        texts = [self._token(token) for token in tokens]
        pairs = list(zip(tokens, texts, steps, strict=True))
        if self._chat:
            return {
                "content": [
                    {**_entry(text, step[token]), "top_logprobs": self._top(step)}
                    for token, text, step in pairs
                ],
                "refusal": None,
            }
        offsets = []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [step[token].logprob for token, _, step in pairs],
            "top_logprobs": [
                {one["token"]: one["logprob"] for one in self._top(step)} for step in steps
            ],
            "text_offset": offsets,
        }

    def echoed(
        self,
        tokens: Sequence[int],
        steps: Sequence[Mapping[int, Logprob] | None] | None,
        own: dict[str, Any] | None,
    ) -> dict[str, Any] | None:
        """Log-probabilities of a prompt's tokens, the first of which has none, before `own`."""
        if own is None or steps is None:
            return own
        found = self.logprobs(tokens[1:], [one for one in steps[1:] if one is not None])
        assert found is not None
        first = self._token(tokens[0])
        found = {name: [None, *values] for name, values in found.items()}
        found["tokens"][0], found["text_offset"][0] = first, 0
        found["text_offset"][1:] = [at + len(first) for at in found["text_offset"][1:]]
        end = found["text_offset"][-1] + len(found["tokens"][-1])
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
                    "decoded_token": self._token(token),
                }
                for token, one in step.items()
            }
            for step in steps
        ]

    def text_of(self, tokens: Sequence[int], text: str | None) -> str:
        """A prompt as it was given, or what its tokens say."""
        return str(self.tokenizer.decode(list(tokens))) if text is None else text

    def _top(self, step: Mapping[int, Logprob]) -> list[dict[str, Any]]:
        most = self._shown or 0
        best = sorted((one.rank, token) for token, one in step.items() if one.rank <= most)
        return [_entry(self._token(token), step[token]) for _, token in best]

    def _token(self, token: int) -> str:
        if token not in self._texts:
            self._texts[token] = str(self.tokenizer.decode([token]))
        return self._texts[token]


def _entry(text: str, one: Logprob) -> dict[str, Any]:
    known = None if _INCOMPLETE in text else list(text.encode())
    return {"token": text, "logprob": one.logprob, "bytes": known}


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


def event(document: Any) -> bytes:
    """As a server-sent event."""
    return b"data: " + encoded(document) + b"\n\n"
