"""What recurrent layers remember: states of a fixed size for each sequence."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterator, Sequence
from weakref import proxy

import torch
from torch import Tensor

from qoff.errors import ArgumentError
from qoff.kernels.layout.ragged import Ragged
from qoff.kernels.layout.states import LayerStates, StateShape, state_bytes
from qoff.kernels.layout.steady import SteadyMemory
from qoff.kvcache.base import CachePass, KVCache

from .drafted_states import DraftedPass, DraftedStates

NO_WAY_BACK = (
    "this model has recurrent states, which cannot go back to an earlier token; start with an "
    "empty cache"
)


class StateCache(KVCache):
    """States of the layers `shapes`, float32, which sum up all tokens of a sequence.

    A pass writes over what was before it, so one that does not end leaves them worthless: then, and
    where they would have to go back to an earlier token, only sequences from their first token on
    can follow. device: whose memory they are in. drafted: tokens of a sequence that a pass over few
    may have beside the newest one, and which can be forgotten until the next pass.
    """

    def __init__(
        self,
        shapes: Sequence[StateShape],
        sequences: int,
        device: torch.device | str = "cpu",
        drafted: int = 0,
    ) -> None:
        def empty(*size: int) -> Tensor:
            return torch.empty(sequences, *size, device=device)

        self.shapes = tuple(shapes)
        self.lengths = [0] * sequences
        self.conv = [empty(*shape.conv_shape) for shape in shapes]
        self.memory = [empty(*shape.memory_shape) for shape in shapes]
        self.steady = SteadyMemory()
        self.drafts = DraftedStates(sequences, drafted) if drafted else None
        self.spoiled = False

    @property
    def nbytes(self) -> int:
        drafts = 0 if self.drafts is None else self.drafts.nbytes
        return len(self.lengths) * state_bytes(self.shapes) + drafts

    @property
    def addresses(self) -> tuple[int, ...]:
        """Where the states of each layer are."""
        return tuple(part.data_ptr() for part in (*self.conv, *self.memory))

    def bytes_for(self, tokens: int) -> int:
        # A layer is copied where sequences move to other rows.
        largest = max(shape.state_bytes for shape in self.shapes)
        return self.nbytes + len(self.lengths) * largest

    def reserve(self, tokens: int) -> None:
        """There is room for any number."""

    def begin(self, ragged: Ragged) -> StatePass:
        """As `KVCache.begin`. Raises ArgumentError where the states are worthless."""
        self.check(ragged)
        self.ended, self.spoiled = None, True  # until the pass ends
        return StatePass(self, ragged)

    def drafted(self, slot: int) -> int:
        """How many of a sequence's newest tokens can be forgotten."""
        return 0 if self.drafts is None else max(0, self.drafts.waiting[slot] - 1)

    def take_back(self, tokens: Sequence[int]) -> None:
        """Forget so many of the newest tokens, which `drafted` says can be, of each sequence."""
        for slot, count in enumerate(tokens):
            if self.drafts is not None and count <= self.drafted(slot):
                self.drafts.waiting[slot] -= count

    def check(self, ragged: Ragged) -> None:
        """Raise ArgumentError where the states that a pass goes on from are worthless."""
        if self.spoiled and any(span.past for span in ragged.spans):
            raise ArgumentError(
                "the last forward pass on this cache ended half-way through, and its states with "
                "it; use a new cache"
            )

    def copy(self, source: int, target: int) -> None:
        """Give a sequence what another one has."""
        for part in (*self.conv, *self.memory):
            part[target] = part[source]
        if self.drafts is not None:
            self.drafts.copy(source, target)

    def reset(self, slot: int) -> None:
        """A sequence begins in a slot."""
        if self.drafts is not None:
            self.drafts.waiting[slot] = 0

    def save(self, slot: int, saved: Tensor) -> None:
        """Copy the states of a sequence to `saved`, float32 [state_bytes / 4], on any device."""
        assert self.drafts is None or not self.drafts.waiting[slot]
        for part, place in self._beside(slot, saved):
            place.copy_(part)

    def load(self, slot: int, saved: Tensor) -> None:
        """Give a sequence states that were saved."""
        self.reset(slot)
        for part, place in self._beside(slot, saved):
            part.copy_(place)

    def _beside(self, slot: int, saved: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        parts = [part[slot].view(-1) for part in (*self.conv, *self.memory)]
        return zip(parts, saved.split([len(part) for part in parts]), strict=True)

    def select(self, sequences: Sequence[int]) -> None:
        self.ended, kept = None, list(sequences)
        for parts in (self.conv, self.memory):
            for layer, part in enumerate(parts):
                parts[layer] = part[kept]
        self.lengths = [self.lengths[i] for i in kept]

    def lose(self) -> None:
        self.spoiled = True

    def can_forget(self, tokens: Sequence[int]) -> bool:
        return not goes_back(self.lengths, tokens)

    def forget_each(self, tokens: Sequence[int]) -> None:
        if goes_back(self.lengths, tokens):
            raise ArgumentError(NO_WAY_BACK)
        self.ended = None
        self.lengths = [
            0 if count >= length else length
            for length, count in zip(self.lengths, tokens, strict=True)
        ]


class StatePass(CachePass):
    """A forward pass; slot i of `ragged` is sequence `slots[i]` of the cache (None: i)."""

    def __init__(
        self, cache: StateCache, ragged: Ragged, slots: Sequence[int] | None = None
    ) -> None:
        self._cache: StateCache = proxy(cache)  # which may keep the pass when it has ended
        self.ragged = ragged
        where = range(len(cache.lengths)) if slots is None else slots
        rows = [(span.start, span.count, where[span.slot]) for span in ragged.spans]
        spans = torch.tensor(rows, dtype=torch.int64)
        steady = slots is None and ragged.is_decode
        self._spans = cache.steady.put("spans", spans) if steady else spans

    in_place = True

    def open(self, layer: int) -> LayerStates:
        return LayerStates(self._cache.conv[layer], self._cache.memory[layer], self._spans)

    def replay_key(self) -> Hashable | None:
        if not self.ragged.is_decode:
            return None
        return self._spans.data_ptr(), *self._cache.addresses

    def layers_key(self) -> Hashable:
        return self._cache.addresses

    def end(self) -> None:
        self._cache.lengthen(self.ragged)
        self._cache.spoiled = False

    def steps_ahead(self, ragged: Ragged) -> int:
        return sys.maxsize if ragged.goes_on(self.ragged, self._cache.lengths) else 0

    def going_on(self) -> None:
        self._cache.spoiled = True

    def advance(self, steps: int) -> None:
        self._cache.lengthen(self.ragged, steps)
        self._cache.spoiled = False


def drafted_pass(
    cache: StateCache, ragged: Ragged, slots: Sequence[int] | None
) -> DraftedPass | None:
    """A pass as one over drafts, or over what follows one; None where it is another."""
    drafts = cache.drafts
    if drafts is None or slots is not None or not drafts.concerns(ragged):
        return None
    return drafts.begin(ragged)


def goes_back(lengths: Sequence[int], tokens: Sequence[int]) -> bool:
    """Whether any of these sequences forgets a part of its tokens: not all of them, nor none."""
    return any(0 < count < length for length, count in zip(lengths, tokens, strict=True))


def places(linear: Sequence[bool]) -> list[tuple[bool, int]]:
    """Of each layer whether it has states, and its number among those alike."""
    return [(one, linear[:layer].count(one)) for layer, one in enumerate(linear)]
