"""The tokens of one forward pass: several sequences, each with its own, without padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from qoff.errors import OpError

from .steady import SteadyMemory

ITEM_TOKENS = 16  # new tokens of a sequence that are attended together


@dataclass(frozen=True)
class Span:
    """The new tokens of one sequence."""

    slot: int  # the sequence's place in the cache
    start: int  # its first row among all new tokens
    count: int  # how many new tokens, at least 1
    past: int  # tokens of this sequence that are in the cache already

    def items(self) -> Iterator[tuple[int, int]]:
        """Tokens that are attended together: the first one's number here, and how many."""
        for first in range(0, self.count, ITEM_TOKENS):
            yield first, min(ITEM_TOKENS, self.count - first)


@dataclass(frozen=True)
class Ragged:
    """Which sequence and position each of the M rows of a forward pass is.

    Spans follow each other without gaps, each in a slot of its own. Raises OpError otherwise.
    """

    spans: tuple[Span, ...]
    longest: int = field(init=False)  # largest position
    sequences: int = field(init=False)  # largest slot + 1

    def __post_init__(self) -> None:
        end = 0
        for span in self.spans:
            if span.count < 1 or span.past < 0 or span.slot < 0 or span.start != end:
                raise OpError(f"a span needs 1 token at least, and to start at row {end}: {span}")
            end += span.count
        slots = [span.slot for span in self.spans]
        if not slots or len(set(slots)) < len(slots):
            raise OpError(f"each sequence needs a cache slot of its own, not {slots}")
        longest = max(span.past + span.count for span in self.spans) - 1
        object.__setattr__(self, "longest", longest)
        object.__setattr__(self, "sequences", max(slots) + 1)

    @cached_property
    def positions(self) -> Tensor:
        """int64 [M], position of each token in its own sequence."""
        if self.is_decode:
            return torch.tensor([span.past for span in self.spans])
        return torch.cat([torch.arange(s.past, s.past + s.count) for s in self.spans])

    @cached_property
    def slots(self) -> Tensor:
        """int64 [M], cache slot of each token's sequence."""
        slots = torch.tensor([span.slot for span in self.spans])
        if self.is_decode:
            return slots
        return slots.repeat_interleave(torch.tensor([span.count for span in self.spans]))

    @cached_property
    def items(self) -> Tensor:
        """int64 [items, 2], first row and number of rows of each item (`Span.items`)."""
        each = ((span, item) for span in self.spans for item in span.items())
        return torch.tensor([(span.start + first, rows) for span, (first, rows) in each])

    @classmethod
    def of(cls, counts: Sequence[int], pasts: Sequence[int]) -> Ragged:
        """Sequence i (in cache slot i) has `pasts[i]` cached and `counts[i]` new tokens."""
        spans, start = [], 0
        for slot, (count, past) in enumerate(zip(counts, pasts, strict=True)):
            spans.append(Span(slot, start, count, past))
            start += count
        return cls(tuple(spans))

    def kept_in(self, memory: SteadyMemory) -> Ragged:
        """The same, with its tensors in this memory."""
        same = copy(self)
        for name in ("positions", "slots"):
            vars(same)[name] = memory.put(name, getattr(self, name))
        return same

    def goes_on(self, before: Ragged, lengths: Sequence[int]) -> bool:
        """Whether it is one more token of each sequence of a decode step; lengths: of the slots."""
        return len(self.spans) == len(before.spans) and all(
            new.count == 1 and new.slot == old.slot and new.past == lengths[new.slot]
            for new, old in zip(self.spans, before.spans, strict=True)
        )

    @property
    def tokens(self) -> int:
        """M, the number of rows."""
        return self.spans[-1].start + self.spans[-1].count

    @property
    def last_rows(self) -> Tensor:
        """int64 [sequences]: row of each sequence's last new token."""
        return torch.tensor([s.start + s.count - 1 for s in self.spans])

    @property
    def is_decode(self) -> bool:
        """One new token a sequence."""
        return self.tokens == len(self.spans)
