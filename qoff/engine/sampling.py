"""The next token of each sequence from its logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from .request import Logprob, SamplingParams, Sequence


class Sampler:
    """Draws the tokens of one answer, by seed and sample alone, or takes those that are given."""

    def __init__(self, sequence: Sequence) -> None:
        self._sequence = sequence
        params = sequence.params
        repetition = params.repetition_penalty != 1
        self._prompt = torch.tensor(sequence.prompt if repetition else ()).long().unique()
        self._repeats = bool(params.presence_penalty or params.frequency_penalty)
        self._least = params.min_tokens if sequence.ends else 0
        self._adjusts = repetition or self._repeats or self._least > 0
        self._greedy = params.temperature == 0
        if self._greedy:
            return
        self._generator = _generator(sequence)
        self._warpers = _warpers(params)

    def draw(self, logits: Tensor) -> int:
        """The next token for float32 logits [vocab_size], which stay as they are.

        Notes its log-probability in the sequence, if asked for, or if the token was given.
        """
        sequence = self._sequence
        if sequence.given:
            token = sequence.given[len(sequence.answer)]
        else:
            token = self._choose(self._adjusted(logits) if self._adjusts else logits)
        count = sequence.params.logprobs
        if sequence.given or count is not None:
            sequence.logprobs.append(logprobs(logits, token, count or 0))
        return token

    def _choose(self, logits: Tensor) -> int:
        if self._greedy:
            return int(logits.argmax())
        no_tokens = torch.empty(1, 0, dtype=torch.int64)  # these warpers look at scores alone
        probabilities = self._warpers(no_tokens, logits[None]).softmax(-1)
        return int(torch.multinomial(probabilities[0], 1, generator=self._generator))

    def _adjusted(self, logits: Tensor) -> Tensor:
        """The logits with penalties, and without the ends of an answer that is too short."""
        params, answer = self._sequence.params, torch.tensor(self._sequence.answer).long()
        logits = logits.clone()
        if params.repetition_penalty != 1:
            seen = torch.cat([self._prompt, answer]).unique()
            were, by = logits[seen], float(params.repetition_penalty)
            logits[seen] = torch.where(were > 0, were / by, were * by)
        if self._repeats:
            tokens, counts = answer.unique(return_counts=True)
            logits[tokens] -= params.frequency_penalty * counts + params.presence_penalty
        if len(answer) < self._least:
            logits[[token for token in self._sequence.ends if token < len(logits)]] = -torch.inf
        return logits


def logprobs(logits: Tensor, token: int, count: int) -> dict[int, Logprob]:
    """Of a token first, then of the `count` most likely ones, for float32 logits [vocab_size]."""
    every = logits.log_softmax(-1)
    value = every[token]
    found = {token: Logprob(float(value), int((every > value).sum()) + 1)}
    if count:
        values, tokens = every.topk(min(count, len(every)))
        for rank, (other, at) in enumerate(zip(tokens.tolist(), values.tolist(), strict=True), 1):
            found.setdefault(other, Logprob(at, rank))
    return found


def _generator(sequence: Sequence) -> torch.Generator:
    generator, seed = torch.Generator(), sequence.params.seed
    if seed is None:
        generator.seed()
        return generator
    return generator.manual_seed((seed + sequence.sample) % 2**63)  # as in vLLM


def _warpers(params: SamplingParams) -> Any:
    """What shapes the distribution, in vLLM's order; called with tokens, which they ignore, and
    scores [1, V].
    """
    warpers: Any = LogitsProcessorList()  # typed for LongTensor
    if params.temperature != 1:
        warpers.append(TemperatureLogitsWarper(float(params.temperature)))
    if params.min_p:
        warpers.append(MinPLogitsWarper(params.min_p))
    if params.top_k > 0:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    return warpers
