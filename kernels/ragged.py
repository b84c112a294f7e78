"""The tokens of one forward pass: several sequences, each with its own, without padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Span:
    """The new tokens of one sequence."""

    slot: int  # the sequence's place in the cache
    start: int  # its first row among all new tokens
    count: int  # how many new tokens
    past: int  # tokens of this sequence that are in the cache already


@dataclass(frozen=True)
class Ragged:
    """Which sequence and position each of the M rows of a forward pass is."""

    spans: tuple[Span, ...]
    positions: Tensor  # int64 [M], position of each token in its own sequence
    slots: Tensor  # int64 [M], cache slot of each token's sequence
    longest: int  # largest position

    @classmethod
    def of(cls, counts: Sequence[int], pasts: Sequence[int]) -> Ragged:
        """Sequence i (in cache slot i) has `pasts[i]` cached and `counts[i]` new tokens."""
        spans, start = [], 0
        for slot, (count, past) in enumerate(zip(counts, pasts, strict=True)):
            spans.append(Span(slot, start, count, past))
            start += count
        positions = [torch.arange(s.past, s.past + s.count) for s in spans]
        slots = torch.repeat_interleave(torch.arange(len(spans)), torch.tensor(list(counts)))
        longest = max(s.past + s.count for s in spans) - 1
        return cls(tuple(spans), torch.cat(positions), slots, longest)

    @property
    def tokens(self) -> int:
        """M, the number of rows."""
        return self.positions.shape[0]

    @property
    def last_rows(self) -> Tensor:
        """int64 [sequences]: row of each sequence's last new token."""
        return torch.tensor([s.start + s.count - 1 for s in self.spans])

    @property
    def is_decode(self) -> bool:
        """One new token a sequence."""
        return self.tokens == len(self.spans)
