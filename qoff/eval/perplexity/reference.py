"""A reference model's predictions of a text in a file, so that they are computed once.

Of each scored token it has the `likeliest` next tokens with their log-probabilities, the exact
log-probability of all others together (the tail), `drawn` tokens of the tail, and the exact loss.
The draws are a systematic sample by probability: so KL(reference || model) is estimated without
bias, with an error that is small where the model is near the reference, and bounded for certain by
what the tail's mass allows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qoff.errors import ArgumentError, FormatError

from .records import Records

LIKELIEST, DRAWN = 512, 128
VERSION = 2
_ROWS = 16  # stored at a time


class Compared(NamedTuple):
    """What some tokens have lost against a reference, float64 [r] each.

    error: the standard error of kl that the draws leave; low, high: what kl is for certain.
    """

    nll: Tensor  # of the reference
    kl: Tensor
    same_top: Tensor  # bool
    error: Tensor
    low: Tensor
    high: Tensor


class Rows(NamedTuple):
    """What is stored of some tokens; tokens and logs: the likeliest ones, then those drawn."""

    tokens: Tensor  # int64 [r, likeliest + drawn]
    logs: Tensor  # float64 [r, likeliest + drawn]
    tail: Tensor  # float64 [r], -inf: nothing is left
    nll: Tensor  # float64 [r]

    @classmethod
    def of(cls, logits: Tensor, wanted: Tensor, likeliest: int, drawn: int, seed: int) -> Rows:
        """Of logits, float32 [r, vocab_size], which predict the tokens `wanted`, int64 [r]."""
        random = torch.Generator().manual_seed(seed)
        parts = zip(logits.split(_ROWS), wanted.split(_ROWS), strict=True)
        found = [cls._of(some, tokens, likeliest, drawn, random) for some, tokens in parts]
        return cls(*(torch.cat(column) for column in zip(*found, strict=True)))

    @classmethod
    def _of(
        cls, logits: Tensor, wanted: Tensor, likeliest: int, drawn: int, random: torch.Generator
    ) -> Rows:
        logs = torch.log_softmax(logits.double(), dim=-1)
        nll = -logs.gather(1, wanted[:, None])[:, 0]
        top = logs.topk(min(likeliest, logs.shape[1]), dim=1)
        if top.indices.shape[1] == logs.shape[1]:
            return cls(top.indices, top.values, torch.full_like(nll, -math.inf), nll)
        rest = logs.scatter(1, top.indices, -math.inf)
        mass = rest.exp().cumsum(1)
        start = torch.rand(len(logs), 1, generator=random, dtype=torch.float64)
        steps = (torch.arange(drawn, dtype=torch.float64) + start) / drawn
        at = torch.searchsorted(mass, steps * mass[:, -1:], right=True)
        at = torch.minimum(
            at, torch.searchsorted(mass, mass[:, -1:].contiguous())
        )  # a rounding beyond the end
        tokens = torch.cat((top.indices, at), 1)
        return cls(tokens, torch.cat((top.values, rest.gather(1, at)), 1), rest.logsumexp(1), nll)

    def compare(self, logs: Tensor, likeliest: int) -> Compared:
        """Compare with a model's log-probabilities, float32 or float64 [r, vocab_size]."""
        ours = logs.double()
        apart = self.logs - ours.gather(1, self.tokens)
        kept, drawn = apart[:, :likeliest], apart[:, likeliest:]
        sure = (self.logs[:, :likeliest].exp() * kept).sum(1)
        same = self.tokens[:, 0] == ours.argmax(1)
        mass, count = self.tail.exp(), drawn.shape[1]
        if not count or bool((mass == 0).all()):
            return Compared(self.nll, sure, same, torch.zeros_like(sure), sure, sure)
        rest = ours.scatter(1, self.tokens[:, :likeliest], -math.inf)
        low = sure + _times(mass, self.tail - rest.logsumexp(1))
        least = ours.scatter(1, self.tokens[:, :likeliest], math.inf).amin(1)
        most = torch.minimum(self.logs[:, likeliest - 1], self.tail)  # of one token of the tail
        high = sure + _times(mass, most - least)
        spread = drawn.std(1) if count > 1 else torch.full_like(mass, math.inf)
        error = _times(mass, spread / math.sqrt(count))
        return Compared(self.nll, sure + _times(mass, drawn.mean(1)), same, error, low, high)


def _times(mass: Tensor, value: Tensor) -> Tensor:
    """Their product; nothing where there is no mass."""
    return torch.where(mass > 0, mass * value, 0.0)


class Reference:
    """Predictions that are stored in a file, of all windows of a text or of the first ones.

    file: its path, or its records, which are closed with it. Raises FormatError for what is no such
    file, DiskReadError.
    """

    def __init__(self, file: Path | Records) -> None:
        self._records = file if isinstance(file, Records) else Records(file)
        self.path, self._held = self._records.path, dict[int, Rows]()
        self.says = self._records.says
        try:
            self.name, self.text = str(self.says["model"]), str(self.says["text"])
            self.vocab_size = int(self.says["vocab_size"])
            self._likeliest = int(self.says["likeliest"])
            if (self.says["kind"], self.says["version"]) != ("reference", VERSION):
                raise ValueError("another version")
        except (KeyError, ValueError, TypeError) as error:
            self.close()
            raise FormatError(
                f"{self.path}: no reference of this version; choose another place, or remove it"
            ) from error

    def begin(self, numbers: list[int], tokens: Tensor, place: int) -> None:
        """See `scoring.Truth`; what the file has of these windows is in memory till the next."""
        self._held.clear()
        self._held.update((number, self._read(number)) for number in numbers)

    def compare(self, number: int, first: int, logits: Tensor, logs: Tensor) -> Compared:
        """See `scoring.Truth`."""
        rows = Rows(*(x[first : first + len(logs)] for x in self._held[number]))
        return rows.compare(logs, self._likeliest)

    def lacks(self, windows: int) -> int:
        """How many of a text's first windows are not there."""
        return len(set(range(windows)) - set(self._records.windows))

    def size(self) -> tuple[int, int]:
        """Windows that are there, and how many tokens of the first of these are scored."""
        numbers = self._records.windows
        return len(numbers), len(self._records.read(min(numbers))["nll"]) if numbers else 0

    def close(self) -> None:
        self._records.close()

    def _read(self, number: int) -> Rows:
        if number not in self._records.windows:
            raise ArgumentError(f"{self.path}: has no window {number}; complete it first")
        found = self._records.read(number)
        try:
            columns: list[NDArray[Any]] = [found[name] for name in Rows._fields]
        except KeyError as error:
            raise FormatError(
                f"{self.path}: window {number} lacks {error}; choose another place, or remove it"
            ) from error
        tokens, *floats = map(torch.from_numpy, columns)
        return Rows(tokens.long(), *(x.double() for x in floats))


def stored_rows(rows: list[Rows]) -> Mapping[str, NDArray[Any]]:
    """A window's rows as the file has them."""
    tokens, logs, tail, nll = (torch.cat(column) for column in zip(*rows, strict=True))
    small = (tokens.int().numpy(), logs.float().numpy(), tail.numpy(), nll.numpy())
    return dict(zip(Rows._fields, map(np.ascontiguousarray, small), strict=True))
