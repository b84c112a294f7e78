"""From prompts to sequences, each with room for its answer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Sequence_
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from qoff.errors import ArgumentError, ContextLengthError, QoffError, raised_as
from qoff.models.adapters import adapter_number
from qoff.plan import Plan

from .grammar import Grammars
from .pooling import Pooled, PoolingParams
from .prompts import PromptReader, token_ids
from .request import Completion, SamplingParams, Sequence


class Limits(Protocol):
    """What a model takes."""

    @property
    def vocab_size(self) -> int:
        """Tokens that an answer may have: rows of the head."""

    @property
    def embedded_tokens(self) -> int:
        """Tokens that a prompt may have: rows of the embedding, where a head may have fewer."""

    @property
    def position_limit(self) -> int | None:
        """Tokens that a sequence may have; None: as many as there is memory for."""

    def check_positions(self, tokens: int) -> None:
        """Raise ArgumentError for a sequence of more tokens than that."""


class Admission:
    """Turns prompts into the sequences of a plan.

    eos: tokens that end the model's answers. whole_prompts: each is read in one pass.
    adapters: names of those that a prompt may ask for.
    """

    def __init__(
        self,
        plan: Plan,
        limits: Limits,
        reader: PromptReader,
        grammars: Grammars,
        eos: frozenset[int],
        whole_prompts: bool = False,
        adapters: Sequence_[str] = (),
    ) -> None:
        self._plan, self._limits, self._reader, self._eos = plan, limits, reader, eos
        self._whole_prompts = whole_prompts
        self._adapter_number = partial(adapter_number, adapters)
        self._grammars = grammars

    def requests(
        self,
        prompts: list[Any],
        params: SamplingParams | Iterable[SamplingParams],
        continuations: Iterable[list[int]] | None,
        adapters: str | Iterable[str | None] | None = None,
    ) -> Iterator[list[Sequence] | Completion]:
        """The sequences of each prompt, or what is wrong with it.

        Raises ArgumentError for as many parameters, continuations or adapters as there are no
        prompts, and for an adapter that is not there.
        """
        given: list[Any] = [None] * len(prompts)
        if continuations is not None:
            given = _listed("continuations", continuations)
        lists = isinstance(params, Iterable) and not isinstance(params, str | Mapping)
        several = _listed("parameters", params) if lists else None
        for one in [params] if several is None else several:
            if not isinstance(one, SamplingParams):
                raise ArgumentError(f"parameters are SamplingParams, not {type(one).__name__}")
        each: list[Any] = [params] * len(prompts) if several is None else several
        names: list[Any] = [adapters] * len(prompts)
        if adapters is not None and not isinstance(adapters, str):
            names = _listed("adapters", adapters)
        for what, some in (("continuations", given), ("parameters", each), ("adapters", names)):
            if len(some) != len(prompts):
                raise ArgumentError(f"{len(prompts)} prompts, but {what} for {len(some)}")
        numbers = [self._adapter_number(name) for name in names]
        for index, prompt in enumerate(prompts):
            text: str | None = None
            tokens: tuple[int, ...] = ()
            try:
                text, tokens = self._read(prompt)
                yield self._sequences(
                    index, text, tokens, each[index], given[index], numbers[index]
                )
            except QoffError as error:
                yield Completion(index, 0, text, tokens, "", (), "error", error=str(error))

    def pooled(self, prompts: list[Any], params: PoolingParams, size: int) -> list[list[Sequence]]:
        """A sequence of each prompt, whose hidden states, `size` floats each, are pooled.

        params: complete ones. Raises ArgumentError for a prompt that cannot be read.
        """
        found = list[list[Sequence]]()
        for index, prompt in enumerate(prompts):
            try:
                text, tokens = self._read(prompt)
                self._room(tokens, 0)
            except ArgumentError as error:
                raise type(error)(f"prompt {index}: {error}") from error
            pooled = Pooled(params, size)
            found.append([Sequence(index, 0, text, tokens, SamplingParams(), 0, pooled=pooled)])
        return found

    def groups(
        self, prompts: list[Any], params: SamplingParams, adapter: str | None = None
    ) -> list[list[Sequence]]:
        """The sequences of each prompt. Raises ArgumentError where one cannot be answered."""
        number = self._adapter_number(adapter)
        return [
            self._sequences(index, *self._read(prompt), params, None, number)
            for index, prompt in enumerate(prompts)
        ]

    def _read(self, prompt: Any) -> tuple[str | None, tuple[int, ...]]:
        """The text of a prompt and its tokens, all of them if they may fit the plan's context."""
        return self._reader.read(prompt, self._plan.context)

    def _sequences(
        self,
        index: int,
        text: str | None,
        tokens: tuple[int, ...],
        params: SamplingParams,
        after: list[int] | None,
        adapter: int,
    ) -> list[Sequence]:
        """As many as there are answers; the last one is the continuation, if one is given."""
        room = self._room(tokens)
        if params.prompt_logprobs is not None and self._whole_prompts:
            raise ArgumentError("prompt_logprobs: this model reads a prompt in one pass")
        if params.prompt_logprobs is not None:
            self._check_tokens("prompt, of which prompt_logprobs are wanted,", tokens)
        if params.stops:
            _ = self._reader.tokenizer  # raises where there is none
        if after is not None:
            params = replace(params, n=params.n + 1)
            after = list(token_ids(after))
            self._check_tokens("continuation", after)
            if len(after) > room:
                raise ContextLengthError(
                    f"a prompt of {len(tokens)} tokens and {len(after)} new ones are more than "
                    f"{len(tokens) + room}: the plan's context, or what the model is run up to"
                )
        if params.n > self._plan.batch_size:
            raise ArgumentError(
                f"{params.n} answers of a prompt are more than a batch of "
                f"{self._plan.batch_size}; use a plan with a larger batch_size"
            )
        most = room if params.max_tokens is None else min(params.max_tokens, room)
        if params.stop_token_ids:
            self._check_tokens("list of stop_token_ids", params.stop_token_ids)
        if params.logit_bias:
            self._check_tokens("logit_bias", list(params.logit_bias))
        ends = frozenset(params.stop_token_ids or ()) | (
            frozenset() if params.ignore_eos else self._eos
        )
        wanted = params.structured_outputs
        grammar = None if wanted is None else self._grammars.matcher(wanted)
        first = Sequence(
            index, 0, text, tokens, params, most, ends, grammar=grammar, adapter=adapter
        )
        others = [
            replace(first, sample=i, waits_for=first, answer=[], logprobs=[], prompt_logprobs=[],
                    grammar=None if grammar is None else grammar.copy())
            for i in range(1, params.n)
        ]  # fmt: skip
        if after is not None:
            others[-1].given, others[-1].max_tokens = tuple(after), len(after)
            others[-1].grammar = None
        return [first, *others]

    def _room(self, tokens: tuple[int, ...], least: int = 1) -> int:
        """How many tokens an answer may have, `least` or more; 0: an embedding has none.

        Raises ContextLengthError where there is no room for so many.
        """
        self._check_tokens("prompt", tokens, self._limits.embedded_tokens)
        room = self._plan.context - len(tokens)
        if room < least:
            fails = "leaves no room for an answer in" if least else "to embed is longer than"
            raise ContextLengthError(
                f"a prompt of {len(tokens)} tokens {fails} the plan's context of "
                f"{self._plan.context}"
            )
        if self._whole_prompts and len(tokens) > self._plan.prefill_tokens:
            raise ContextLengthError(
                f"this model reads a prompt in one pass: one of {len(tokens)} tokens needs a plan "
                f"with prefill_tokens={len(tokens)} or more"
            )
        limit = self._limits.position_limit
        self._limits.check_positions(len(tokens) + least)
        return room if limit is None else min(room, limit - len(tokens))

    def _check_tokens(
        self, what: str, tokens: tuple[int, ...] | list[int], known: int | None = None
    ) -> None:
        """Raise ArgumentError where there are none, or one that the model does not have.

        known: how many the model has; None: those of answers.
        """
        if not tokens:
            raise ArgumentError(f"the {what} has no tokens")
        vocab = self._limits.vocab_size if known is None else known
        if not 0 <= min(tokens) <= max(tokens) < vocab:
            wrong = min(tokens) if min(tokens) < 0 else max(tokens)
            raise ArgumentError(f"the {what} has token {wrong}; there are 0 to {vocab - 1}")


def _listed(what: str, values: Any) -> list[Any]:
    with raised_as(ArgumentError, f"{what} are of type {type(values).__name__}", "give a list"):
        return list(values)
