"""The next token of each sequence from its logits."""

from __future__ import annotations

import hashlib
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

from .request import SamplingParams, Sequence


class Sampler:
    """Draws the tokens of one answer; the draws depend on seed, prompt index and sample alone."""

    def __init__(self, params: SamplingParams, index: int, sample: int) -> None:
        self._greedy = params.temperature == 0
        if self._greedy:
            return
        digest = hashlib.sha256(f"{params.seed} {index} {sample}".encode()).digest()
        self._generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        self._warpers: Any = LogitsProcessorList()  # typed for LongTensor
        if params.temperature != 1:
            self._warpers.append(TemperatureLogitsWarper(params.temperature))
        if params.top_k:
            self._warpers.append(TopKLogitsWarper(params.top_k))
        if params.top_p < 1:
            self._warpers.append(TopPLogitsWarper(params.top_p))
        if params.min_p:
            self._warpers.append(MinPLogitsWarper(params.min_p))

    def draw(self, logits: Tensor) -> int:
        """The next token for float32 logits [vocab_size]."""
        if self._greedy:
            return int(logits.argmax())
        no_tokens = torch.empty(1, 0, dtype=torch.int64)  # these warpers look at scores alone
        probabilities = self._warpers(no_tokens, logits[None]).softmax(-1)
        return int(torch.multinomial(probabilities[0], 1, generator=self._generator))


class Given(Sampler):
    """Takes the tokens that a sequence is given, and notes there how likely each was."""

    def __init__(self, sequence: Sequence) -> None:
        self._sequence = sequence

    def draw(self, logits: Tensor) -> int:
        """The next token for float32 logits [vocab_size]."""
        found = self._sequence.log_probabilities
        token = self._sequence.given[len(found)]
        found.append(float(logits.log_softmax(-1)[token]))
        return token


def sampler_of(sequence: Sequence) -> Sampler:
    """What chooses the tokens of a sequence."""
    if sequence.given:
        return Given(sequence)
    return Sampler(sequence.params, sequence.index, sequence.sample)
