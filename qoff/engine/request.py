"""What is asked for, what comes back, and a sequence in between."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from qoff.errors import ArgumentError

COLDEST = 0.01  # logits divided by less may overflow
FinishReason = Literal["stop", "length", "given", "error"]


@dataclass(frozen=True)
class SamplingParams:
    """How a prompt is continued. Raises ArgumentError for values out of range.

    temperature 0 takes the most likely token; otherwise one is drawn from the `top_k` most likely
    (0: all), of these from the smallest set with probability `top_p`, without those less likely
    than `min_p` times the most likely one. n: answers of one prompt, drawn independently. stop:
    texts that end an answer and are cut off; eos ends it too unless `ignore_eos`.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    n: int = 1
    stop: str | tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        stops = self.stops
        for name, good, wanted in (
            ("max_tokens", _whole(self.max_tokens) and self.max_tokens >= 1, "at least 1"),
            (
                "temperature",
                self.temperature == 0 or COLDEST <= self.temperature < math.inf,
                f"0, or a number from {COLDEST} on",
            ),
            ("top_k", self.top_k >= 0, "0 or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0, at most 1"),
            ("min_p", 0 <= self.min_p < 1, "0 or more, below 1"),
            ("n", _whole(self.n) and self.n >= 1, "at least 1"),
            ("stop", self.stop == () or (bool(stops) and all(stops)), "texts that are not empty"),
        ):
            if not good:
                raise ArgumentError(f"{name} is {getattr(self, name)!r}; use {wanted}")

    @property
    def stops(self) -> tuple[str, ...]:
        """The texts that end an answer."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


def _whole(number: object) -> bool:
    return isinstance(number, int)


@dataclass(frozen=True)
class Result:
    """One answer. `error` says what went wrong, if its reason is "error".

    log_probabilities: in nats, of the tokens of a continuation that was given.
    """

    index: int  # of the prompt
    sample: int  # of the prompt's n answers
    text: str
    tokens: tuple[int, ...]
    reason: FinishReason
    prompt_tokens: int
    error: str = ""
    log_probabilities: tuple[float, ...] = ()


@dataclass(eq=False)
class Sequence:
    """A prompt with its answer so far, in a slot of a batch."""

    index: int
    sample: int
    prompt: list[int]
    params: SamplingParams
    read: int = 0  # tokens of the prompt that the model has read
    answer: list[int] = field(default_factory=list)
    waits_for: Sequence | None = None  # reads the same prompt; forked when it has
    begins_like: Sequence | None = None  # reads blocks that this one begins with, too
    ended: bool = False
    given: tuple[int, ...] = ()  # the answer, where it is known
    log_probabilities: list[float] = field(default_factory=list)  # of its tokens so far

    @property
    def decoding(self) -> bool:
        """Whether the prompt is read."""
        return self.read == len(self.prompt)
