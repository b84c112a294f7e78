"""Greedy generation in the runtime's own loop, without transformers around it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from qoff.measure.model_rates import Sequences
from qoff.models.runtime import Runtime


@dataclass(frozen=True)
class Timing:
    """When one generation began and when each of its tokens was there, in seconds.

    Those that are computed without Python in between are there together.
    """

    start: float
    stamps: tuple[float, ...]
    batch: int

    @property
    def prefill_s(self) -> float:
        return self.stamps[0] - self.start

    @property
    def wall_s(self) -> float:
        return self.stamps[-1] - self.start

    @property
    def decode_rate(self) -> float:
        """Tokens per second after the first, which comes out of the prefill."""
        return self.batch * (len(self.stamps) - 1) / (self.stamps[-1] - self.stamps[0])

    @property
    def total_rate(self) -> float:
        """All new tokens over the whole time."""
        return self.batch * len(self.stamps) / self.wall_s


class Greedy:
    """One generation: prompts int64 [B, T] of equal length are read when it is made."""

    def __init__(self, runtime: Runtime, prompts: Tensor, new: int) -> None:
        batch, length = prompts.shape
        self._sequences = Sequences(runtime, batch, length + new)
        self.tokens = [self._sequences.read(prompts)]

    def step(self) -> None:
        """Generate one token more of each sequence; `tokens` has them, int64 [B] each."""
        self.tokens.append(self._sequences.read(self.tokens[-1][:, None]))

    def steps(self, count: int) -> Iterator[int]:
        """Generate so many tokens more, some at a time: how many have come."""
        for tokens in self._sequences.generate(self.tokens[-1], count):
            self.tokens += torch.tensor(tokens)
            yield len(tokens)


@torch.inference_mode()
def generate(runtime: Runtime, prompts: Tensor, new: int) -> tuple[Tensor, Timing]:
    """Generate `new` tokens: int64 [B, new], and when each came."""
    start = time.perf_counter()
    greedy = Greedy(runtime, prompts, new)
    stamps = [time.perf_counter()]
    for count in greedy.steps(new - 1):
        stamps += [time.perf_counter()] * count
    return torch.stack(greedy.tokens, dim=1), Timing(start, tuple(stamps), len(prompts))
