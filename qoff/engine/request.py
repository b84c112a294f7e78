"""What is asked for, what comes back, and a sequence in between."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import numpy as np
from torch import Tensor

from qoff.errors import ArgumentError
from qoff.schema import is_number, shown

from .grammar import Matcher, StructuredOutputs
from .pooling import Pooled

_ABOVE_0 = math.nextafter(0, 1)
COLDEST = 0.01  # logits divided by less may overflow
_FACTOR = 1e30  # and by more, or multiplied
FinishReason = Literal["stop", "length", "given", "error"]
LogitsProcessor = Callable[..., Tensor]  # vLLM's
_SWITCHES = ("ignore_eos", "include_stop_str_in_output", "detokenize", "skip_special_tokens")


@dataclass(frozen=True)
class SamplingParams:
    """How a prompt is continued, with vLLM's names, defaults and meaning.

    n: answers of a prompt, drawn independently. temperature 0 takes the most likely token;
    otherwise one is drawn from those at least `min_p` times as likely as the most likely one, of
    these from the `top_k` most likely (0 or -1: all), of these from the smallest set with
    probability `top_p`. Before that, logits of tokens in the answer so far are lowered by
    `presence_penalty`, and by `frequency_penalty` for each time; those of tokens in prompt or
    answer are divided by `repetition_penalty` where positive, else multiplied. seed: the same
    tokens each time, whatever other prompts there are; answer i of n draws with seed + i. None:
    others each time.

    An answer ends with the model's end token unless `ignore_eos`, with a token of `stop_token_ids`,
    before a text of `stop`, but for `min_tokens` tokens with none of them; or after `max_tokens`
    tokens (None: as many as the plan's context holds). logprobs: also return the log-probabilities
    of each chosen token and of so many most likely ones. prompt_logprobs: the same of the prompt's
    tokens; it is then read in pieces of at most as many tokens as its batch has free places, and
    where the KV cache is packed, they and the answer depend in their rounding on what else is
    computed. The text ends before what ended the answer, or with it (`include_stop_str_in_output`),
    and has special tokens unless `skip_special_tokens`; there is none without `detokenize`.
    structured_outputs: what the answer must match, unless `max_tokens` cuts it off.
    logits_processors: functions of the answer's tokens so far, or of the prompt's and these, and of
    the logits, float32 [vocab_size], which they may change; each returns the logits to go on with.
    logit_bias: what is added to the logits of some tokens, by their ids, -100 to 100, before all
    else. Raises ArgumentError for values out of range.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | tuple[str, ...] | None = None
    stop_token_ids: list[int] | tuple[int, ...] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    logits_processors: list[LogitsProcessor] | tuple[LogitsProcessor, ...] | None = None
    structured_outputs: StructuredOutputs | None = None
    logit_bias: Mapping[int, float] | None = None

    def __post_init__(self) -> None:
        for option in fields(self):
            object.__setattr__(self, option.name, _plain(getattr(self, option.name)))
        limit, fewest = self.max_tokens, self.min_tokens
        heated = _within(self.temperature, 0, 0) or _within(self.temperature, COLDEST)
        for name, good, wanted in (
            ("n", _whole(self.n, 1), "a whole number from 1"),
            ("presence_penalty", _within(self.presence_penalty, -2, 2), "a number from -2 to 2"),
            ("frequency_penalty", _within(self.frequency_penalty, -2, 2), "a number from -2 to 2"),
            (
                "repetition_penalty",
                _within(self.repetition_penalty, 1 / _FACTOR, _FACTOR),
                "a number above 0, at most 1e30",
            ),
            ("temperature", heated, f"0, or a number from {COLDEST} on"),
            ("top_p", _within(self.top_p, _ABOVE_0, 1), "above 0, at most 1"),
            ("top_k", _whole(self.top_k, -1), "a whole number from 1; 0 or -1 for all tokens"),
            ("min_p", _within(self.min_p, 0, 1) and self.min_p < 1, "0 or more, below 1"),
            ("seed", self.seed is None or _whole(self.seed, 0), "a whole number from 0, or None"),
            ("stop", _texts(self.stop), "None, a text, or a list of texts, none of them empty"),
            ("stop_token_ids", _ids(self.stop_token_ids), "None, or a list of token ids"),
            *((name, isinstance(getattr(self, name), bool), "True or False") for name in _SWITCHES),
            ("max_tokens", limit is None or _whole(limit, 1), "a whole number from 1, or None"),
            (
                "min_tokens",
                _whole(fewest, 0, limit if _whole(limit, 1) else None),
                "a whole number from 0 to max_tokens",
            ),
            (
                "structured_outputs",
                isinstance(self.structured_outputs, StructuredOutputs | None),
                "StructuredOutputs, or None",
            ),
            *(
                (name, getattr(self, name) is None or _whole(getattr(self, name), 0),
                 "0 or more, or None")
                for name in ("logprobs", "prompt_logprobs")
            ),
            (
                "logits_processors",
                isinstance(self.logits_processors, list | tuple | None)
                and all(map(callable, self.logits_processors or ())),
                "None, or a list of functions",
            ),
            (
                "logit_bias",
                isinstance(self.logit_bias, Mapping | None)
                and all(_whole(token, 0) for token in self.logit_bias or ())
                and all(_within(x, -100, 100) for x in (self.logit_bias or {}).values()),
                "None, or numbers from -100 to 100 by token ids",
            ),
        ):  # fmt: skip
            if not good:
                raise ArgumentError(f"{name} is {shown(getattr(self, name))}; use {wanted}")
        if self.stop and not self.detokenize:
            raise ArgumentError("stop texts need detokenize=True; use stop_token_ids without")
        if self.structured_outputs is not None and (self.ignore_eos or self.min_tokens):
            raise ArgumentError(
                "an answer of structured_outputs ends where it is complete; leave out ignore_eos "
                "and min_tokens"
            )
        for option in fields(self):
            if isinstance(option.default, float):  # whole numbers would make tensors of integers
                object.__setattr__(self, option.name, float(getattr(self, option.name)))

    @property
    def stops(self) -> tuple[str, ...]:
        """The texts that end an answer."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


def _plain(value: Any) -> Any:
    """A value, and what a list or dict has, with Python's numbers in place of NumPy's."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, list | tuple) and any(isinstance(one, np.generic) for one in value):
        return [_plain(one) for one in value]
    if isinstance(value, Mapping) and any(
        isinstance(one, np.generic) for pair in value.items() for one in pair
    ):
        return {_plain(name): _plain(one) for name, one in value.items()}
    return value


def _whole(number: object, least: int, most: int | None = None) -> bool:
    if isinstance(number, bool) or not isinstance(number, int):
        return False
    return number >= least and (most is None or number <= most)


def _within(number: object, least: float, most: float = math.inf) -> bool:
    """Whether it is a finite number from `least` to `most`."""
    return is_number(number) and least <= number <= most  # type: ignore[operator]


def _texts(stop: object) -> bool:
    if stop is None or isinstance(stop, str):
        return stop != ""
    return isinstance(stop, list | tuple) and all(isinstance(s, str) and s for s in stop)


def _ids(ids: object) -> bool:
    return ids is None or (isinstance(ids, list | tuple) and all(_whole(one, 0) for one in ids))


@dataclass(frozen=True)
class Logprob:
    """A token's log-probability in nats, and its rank: 1 is the most likely token."""

    logprob: float
    rank: int


@dataclass(frozen=True)
class Completion:
    """One answer to a prompt.

    prompt: its text, with the chat template applied; None where token ids were given. text ends
    before the stop text, token_ids before the token that ended the answer. finish_reason: "stop",
    "length", "given" for a continuation that was given, or "error", and then `error` says what is
    wrong. logprobs, if asked for, by token id for each of token_ids: of the token itself first,
    then of the most likely ones; from the model's logits, before temperature and penalties.
    prompt_logprobs: the same of prompt_token_ids, None for the first.
    """

    index: int  # of the prompt
    sample: int  # of the prompt's n answers
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[Mapping[int, Logprob], ...] | None = None
    error: str = ""
    prompt_logprobs: tuple[Mapping[int, Logprob] | None, ...] | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        """The log-probability of all of token_ids, in nats; None without `logprobs`."""
        if self.logprobs is None:
            return None
        steps = zip(self.token_ids, self.logprobs, strict=True)
        return sum(step[token].logprob for token, step in steps)


@dataclass(eq=False)
class Sequence:
    """A prompt with its answer so far, in a slot of a batch."""

    index: int
    sample: int
    text: str | None  # of the prompt, where it is known
    prompt: tuple[int, ...]
    params: SamplingParams
    max_tokens: int  # of the answer
    ends: frozenset[int] = frozenset()  # tokens that end the answer
    read: int = 0  # tokens of the prompt that the model has read
    answer: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)  # of the answer, if asked for
    prompt_logprobs: list[dict[int, Logprob] | None] = field(default_factory=list)
    waits_for: Sequence | None = None  # reads the same prompt; forked when it has
    adapter: int = -1  # its number; -1: none
    begins_like: Sequence | None = None  # reads blocks that this one begins with, too
    placed: float | None = None  # when it first had a place, by `time.perf_counter`
    may_share: bool = False  # begins with blocks that are there, if it has read nothing
    saved_at: set[int] = field(default_factory=set)  # tokens read when its states are kept
    ended: bool = False
    given: tuple[int, ...] = ()  # the answer, where it is known
    grammar: Matcher | None = None  # of what the answer must match
    pooled: Pooled | None = None  # what is wanted instead of an answer
    error: str = ""  # why it cannot go on
    background: bool = False  # other prompts are read first

    @property
    def decoding(self) -> bool:
        """Whether the prompt is read."""
        return self.read == len(self.prompt)

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of its prompt are wanted."""
        return self.params.prompt_logprobs is not None

    def begin_again(self) -> None:
        """Forget the answer so far, and that the prompt was read."""
        self.read, self.begins_like, self.ended = 0, None, False
        self.may_share = False
        self.saved_at.clear()
        self.answer.clear()
        if self.grammar is not None:
            self.grammar.reset()
        self.logprobs.clear()
        self.prompt_logprobs = []
        if self.pooled is not None:
            self.pooled.begin_again()
