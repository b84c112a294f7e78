"""What is to be computed: prompts, answers, how many, and what counts."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal, Self

from qoff.errors import ArgumentError
from qoff.kernels.layout.kv_format import BLOCK_TOKENS
from qoff.memory.experts.routes import RecordedRoutes
from qoff.schema import is_number

_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")
_MOST = 1 << 24  # tokens of a sequence


@dataclass(frozen=True)
class Lengths:
    """Tokens of prompts or of answers: their mean and the most that one has.

    Raises ArgumentError for numbers that are no lengths.
    """

    mean: float
    most: int

    def __post_init__(self) -> None:
        whole = type(self.most) is int and 1 <= self.most <= _MOST
        if not whole or not is_number(self.mean) or not 1 <= self.mean <= self.most:
            raise ArgumentError(
                f"lengths of {self.mean!r} tokens on average, {self.most!r} at most; use numbers "
                f"from 1 to {_MOST:,}, the mean not above the most"
            )

    @classmethod
    def of(cls, value: int | str | list[int]) -> Self:
        """From a number, text like "512" or "100-900" (all alike likely), or a list of lengths."""
        if isinstance(value, list) and value and all(type(x) is int for x in value):
            return cls(sum(value) / len(value), max(value))
        match = _RANGE.fullmatch(value) if isinstance(value, str) else None
        if match is not None:
            first, last = int(match[1]), int(match[2] or match[1])
            if first > last:
                raise ArgumentError(f"{value!r} is no length: {first} is more than {last}")
            return cls((first + last) / 2, last)
        if type(value) is int:
            return cls(value, value)
        raise ArgumentError(f"{value!r} is no length; write tokens like 512, or 100-900")


@dataclass(frozen=True)
class Workload:
    """Requests of a kind. objective: least seconds for all of them, or for one alone.

    token_s: seconds between two tokens of a sequence at most. shared: part of each prompt that
    others have had, too, in whole blocks. routes: which experts a text like these took.
    acceptance: part of the drafted tokens, each after accepted ones, that the model chooses, too.
    Raises ArgumentError for values out of range.
    """

    prompt: Lengths = field(default_factory=lambda: Lengths.of(512))
    answer: Lengths = field(default_factory=lambda: Lengths.of(128))
    requests: int = 256
    objective: Literal["throughput", "latency"] = "throughput"
    token_s: float | None = None
    shared: float = 0.0
    routes: RecordedRoutes | None = None
    acceptance: float = 0.0

    def __post_init__(self) -> None:
        if type(self.requests) is not int or not 1 <= self.requests <= 1 << 40:
            raise ArgumentError(f"requests is {self.requests!r}; use a whole number from 1")
        if self.objective not in ("throughput", "latency"):
            raise ArgumentError(f"objective is {self.objective!r}; use one of throughput, latency")
        if self.token_s is not None and not (is_number(self.token_s) and self.token_s > 0):
            raise ArgumentError(f"token_s is {self.token_s!r}; use seconds above 0")
        if not is_number(self.acceptance) or not 0 <= self.acceptance < 1:
            raise ArgumentError(f"acceptance is {self.acceptance!r}; use a part from 0, below 1")
        if not is_number(self.shared) or not 0 <= self.shared < 1:
            raise ArgumentError(f"shared is {self.shared!r}; use a part from 0, below 1")

    @property
    def context(self) -> int:
        """Tokens of a sequence at most, in whole blocks."""
        most = self.prompt.most + self.answer.most
        return -(-most // BLOCK_TOKENS) * BLOCK_TOKENS

    @property
    def at_once(self) -> int:
        """Requests that are there together: one where it is a single one's latency that counts."""
        return 1 if self.objective == "latency" else self.requests

    def tokens_of_pass(self, drafted: int) -> float:
        """Tokens that a sequence gets of a pass with so many drafted ones, on average.

        The first one that is not accepted ends the draft, and the model's own token comes in its
        place (arXiv 2211.17192, section 3.1).
        """
        return (1 - self.acceptance ** (drafted + 1)) / (1 - self.acceptance)
