"""How a text longer than the context is cut, and which tokens of each piece are scored.

Three definitions are in use, and give different perplexities for the same model and text:

- strided: windows of `length` tokens, each `stride` after the last. Each scores what no window
  before it has, but not its own first token, which nothing comes before.
- llama.cpp: windows that do not overlap; the second half of each is scored, a rest is left out
  (`llama-perplexity`, b4000 and later).
- lm_eval: windows that do not overlap, each of which reads the last token before it, the first the
  beginning-of-text token, or else that of the end; a short last one begins earlier
  (`loglikelihood_rolling`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from qoff.errors import ArgumentError
from qoff.units import counted


@dataclass(frozen=True)
class Window:
    """Tokens [start, stop) of a text, of which [first, stop) are scored."""

    start: int
    stop: int
    first: int
    prefix: bool = False  # a token of the tokenizer's is read before them

    @property
    def scored(self) -> int:
        return self.stop - self.first

    @property
    def place(self) -> int:
        """Of the first scored token, among what is read."""
        return self.first - self.start + self.prefix

    def tokens(self, ids: Tensor, prefix_token: int | None) -> Tensor:
        """What is read and predicted: int64 [prefix + stop - start]."""
        part = ids[self.start : self.stop]
        return torch.cat((torch.tensor([prefix_token]), part)) if self.prefix else part


def _strided(total: int, length: int, stride: int) -> list[Window]:
    if not 0 < stride <= length:
        raise ArgumentError(f"a stride of {stride} tokens; use 1 to {length}, the window")
    out, done = [], 1
    for start in range(0, total, stride):
        stop = min(start + length, total)
        first = max(done, start + 1)
        if stop > first:
            out.append(Window(start, stop, first))
        if stop == total:
            break
        done = stop
    return out


def _llama_cpp(total: int, length: int, _: int) -> list[Window]:
    return [
        Window(start, start + length, start + length // 2 + 1)
        for start in range(0, total - length + 1, length)
    ]


def _lm_eval(total: int, length: int, _: int) -> list[Window]:
    out = [Window(0, length, 0, prefix=True)]
    while out[-1].stop < total:
        stop = min(out[-1].stop + length, total)
        out.append(Window(stop - length - 1, stop, out[-1].stop))
    return out


# Of a text of so many tokens: windows of a length, a stride apart.
DEFINITIONS: Mapping[str, Callable[[int, int, int], list[Window]]] = {
    "strided": _strided,
    "llama.cpp": _llama_cpp,
    "lm_eval": _lm_eval,
}


def check_definition(definition: str) -> None:
    """Raise ArgumentError for an unknown definition."""
    if definition not in DEFINITIONS:
        raise ArgumentError(f"there is no definition {definition!r}; use {', '.join(DEFINITIONS)}")


def cut(
    total: int,
    length: int,
    *,
    stride: int | None = None,
    definition: str = "strided",
    limit: int | None = None,
) -> list[Window]:
    """The first `limit` windows of a text of `total` tokens.

    Raises ArgumentError for an unknown definition, a length below 2, a stride that leaves tokens
    out, or a text that is shorter than one window.
    """
    check_definition(definition)
    if limit is not None and limit < 1:
        raise ArgumentError(f"{limit} windows; use 1 at least")
    if length < 2:
        raise ArgumentError(f"windows of {length} tokens; use 2 at least")
    if total < length:
        raise ArgumentError(
            f"the text has {counted(total, 'token')}, less than one window of {length}; use a "
            "longer text or shorter windows"
        )
    return DEFINITIONS[definition](total, length, length if stride is None else stride)[:limit]
