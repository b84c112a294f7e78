"""Layers whose packed blocks come and go together: those that see as many of the newest tokens.

Blocks that no query of a layer will read any more, behind its sliding window or before its chunk,
are free at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from qoff.kernels.layout.heads import HeadShape, first_seen
from qoff.kernels.layout.kv_format import BLOCK_TOKENS
from qoff.kernels.layout.steady import SteadyMemory

from .store.base import Blocks

FORGETTABLE = 128  # newest tokens that a cache can forget, where nothing else is said


@dataclass(frozen=True)
class LayerGroup:
    """Some layers of a cache. reach: `HeadShape.reach` of each; 0: their blocks are all kept.

    back: of the newest tokens, so many can be forgotten again.
    """

    layers: tuple[int, ...]
    reach: int = 0
    back: int = 0

    def unseen(self, length: int) -> int:
        """How many of the oldest blocks are free behind `length` tokens."""
        return self._before(length - self.back)

    def readable(self, freed: int, length: int) -> bool:
        """Whether what is there without the oldest `freed` blocks does for a token at `length`."""
        return freed <= self._before(length)

    def blocks_at_once(self, tokens: int, window: int) -> int:
        """The most blocks of a sequence of up to so many tokens, of which `window` are not packed.

        Before and in passes of single tokens; others have those beside them that they make.
        """
        return _blocks_at_once(self.reach, self.back, tokens, window)

    def made_at_once(self, tokens: int, sequences: int, window: int, most: int) -> int:
        """The most blocks that are kept of a pass of up to so many new tokens, and were made in it.

        most: tokens of a sequence.
        """
        sequences = min(sequences, tokens)
        each = self.blocks_at_once(most, window)
        return min(sequences * each, (tokens + (BLOCK_TOKENS - 1) * sequences) // BLOCK_TOKENS)

    def _before(self, position: int) -> int:
        """Blocks that no query from a position on sees."""
        if not self.reach:
            return 0
        return max(0, first_seen(max(0, position), self.reach)) // BLOCK_TOKENS


def layer_groups(
    shapes: Sequence[HeadShape], back: int = FORGETTABLE, tokens: int | None = None
) -> tuple[LayerGroup, ...]:
    """The groups of a model's layers, of sequences of up to `tokens` tokens (None: of any length).

    Layers that see all of these are in the first group, if there are any.
    """
    found = dict[int, list[int]]()
    for layer, shape in enumerate(shapes):
        sees_all = shape.window is None or (tokens is not None and shape.window >= tokens)
        found.setdefault(0 if sees_all else shape.reach, []).append(layer)
    if not found:
        return one_group(shapes)
    order = sorted(found, key=lambda reach: (reach != 0, reach))
    return tuple(LayerGroup(tuple(found[reach]), reach, back if reach else 0) for reach in order)


def one_group(shapes: Sequence[HeadShape]) -> tuple[LayerGroup, ...]:
    """All layers in one group, whose blocks are all kept."""
    return (LayerGroup(tuple(range(len(shapes)))),)


def groups_of(shapes: Sequence[HeadShape], frees: bool) -> tuple[LayerGroup, ...]:
    """The groups of layers of a cache that frees blocks as soon as it can, or keeps all."""
    return layer_groups(shapes) if frees else one_group(shapes)


@lru_cache(maxsize=1024)
def _blocks_at_once(reach: int, back: int, tokens: int, window: int) -> int:
    past = np.arange(max(1, tokens), dtype=np.int64)  # of a pass of one token
    packed = np.maximum(0, past + 1 - window) // BLOCK_TOKENS
    if not reach:
        return int(packed[-1])
    position = np.maximum(0, past - back)
    first = position + 1 - reach if reach > 0 else position - position % -reach
    return int(max(0, (packed - np.maximum(0, first) // BLOCK_TOKENS).max()))


class NewBlocks(NamedTuple):
    """Blocks of a sequence that a pass completes, from place `first` on.

    The first `skipped` are free after it: they are nowhere, and have the number of any other.
    """

    first: int
    numbers: list[int]
    skipped: int

    @property
    def kept(self) -> list[int]:
        return self.numbers[self.skipped :]


class GroupBlocks:
    """The blocks of a group's layers, of sequences in slots.

    blocks: of each sequence, oldest first. The oldest `freed` of these are no longer there; their
    numbers tell their tier, nothing else. memory: where tables of decode steps lie.
    """

    def __init__(self, group: LayerGroup, store: Blocks, sequences: int) -> None:
        self.group, self.store = group, store
        self.first_owner = store.claim(sequences)
        self.blocks: list[list[int]] = [[] for _ in range(sequences)]
        self.freed = [0] * sequences
        self.memory = SteadyMemory()

    def live(self, slot: int) -> list[int]:
        """The blocks of a sequence that are there."""
        return self.blocks[slot][self.freed[slot] :]

    def free(self, slot: int, length: int) -> None:
        """Give back what a sequence of so many tokens will not read."""
        freed = self.freed[slot]
        unseen = min(self.group.unseen(length), len(self.blocks[slot]))
        if unseen > freed:
            self.store.release(self.blocks[slot][freed:unseen])
            self.freed[slot] = unseen

    def make(self, slot: int, count: int, length: int, expected: int) -> NewBlocks:
        """Take `count` blocks, after which the sequence has `length` tokens. Raises BudgetError."""
        first, skipped = len(self.blocks[slot]), self.skipped(slot, count, length)
        places = range(first, first + count)
        numbers = [self.store.stands_for(index, expected) for index in places[:skipped]]
        numbers += self.store.allocate(places[skipped:], expected, self.first_owner + slot)
        return NewBlocks(first, numbers, skipped)

    def skipped(self, slot: int, count: int, length: int) -> int:
        """How many of `count` new blocks nobody reads when the sequence has `length` tokens."""
        return max(0, min(self.group.unseen(length) - len(self.blocks[slot]), count))

    def add(self, slot: int, new: NewBlocks) -> None:
        """They are the sequence's."""
        if new.skipped:
            self.store.release(self.live(slot))
            self.freed[slot] = new.first + new.skipped
        self.blocks[slot] += new.numbers

    def copy(self, source: int, target: int) -> None:
        """Let an empty slot share another one's blocks."""
        self.store.share(self.live(source))
        self.blocks[target] = list(self.blocks[source])
        self.freed[target] = self.freed[source]

    def select(self, sequences: Sequence[int]) -> None:
        """Keep the given sequences, in this order; one may be named more than once."""
        slots = range(len(self.blocks))
        self.store.share(block for i in sequences for block in self.live(i))
        self.store.release([block for i in slots for block in self.live(i)])
        self.blocks = [list(self.blocks[i]) for i in sequences]
        self.freed = [self.freed[i] for i in sequences]

    def shorten(self, slot: int, kept: int) -> None:
        """Let go of all but the oldest blocks of a sequence.

        The newest is given away first: no other one is found by what it has.
        """
        freed = self.freed[slot]
        self.store.release(reversed(self.blocks[slot][max(kept, freed) :]))
        self.blocks[slot] = self.blocks[slot][:kept]
        self.freed[slot] = min(freed, kept)


def by_layer(groups: Sequence[GroupBlocks]) -> Mapping[int, tuple[int, int]]:
    """The group of each layer, and the layer's place there."""
    return {
        layer: (number, place)
        for number, blocks in enumerate(groups)
        for place, layer in enumerate(blocks.group.layers)
    }
