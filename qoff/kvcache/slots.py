"""What packed caches share: sequences in slots that are filled, forked and emptied one by one."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import proxy

from qoff.errors import ArgumentError
from qoff.kernels.layout.kv_format import BLOCK_TOKENS
from qoff.kernels.layout.ragged import Ragged

from .base import CachePass, KVCache
from .store.base import Blocks


class SlotPass(CachePass):
    """A forward pass on a cache; slot i of `ragged` is slot `slots[i]` of the cache (None: i)."""

    def __init__(self, cache: SlotCache, ragged: Ragged, slots: Sequence[int] | None) -> None:
        self._cache: SlotCache = proxy(cache)  # which may keep the pass when it has ended
        self.ragged = ragged
        self._slots = range(cache.sequences) if slots is None else slots
        self._new: dict[int, list[int]] = {}  # blocks that it fills, by slot of the cache

    def end(self) -> None:
        for slot, blocks in self._new.items():
            self._cache.blocks[slot] += blocks
        self._new = {}
        for span in self.ragged.spans:
            self._cache.lengths[self._slots[span.slot]] += span.count
        self._cache.over(self)

    def abandon(self) -> None:
        for blocks in self._new.values():
            self._cache.store.release(blocks)
        self._new = {}
        self._cache.over(self)

    @property
    @abstractmethod
    def spoils(self) -> bool:
        """Whether the cache is worthless if this pass does not end."""


class SlotCache(KVCache):
    """Sequences in slots, each with packed blocks and recent tokens that are not packed.

    The newest `window` tokens are never packed, nor are the oldest `sinks`. blocks: of each
    sequence, oldest first. expected: how many each will have, as far as known.
    """

    store: Blocks
    equal_prompts: bool = False  # whether a pass may read prompts of one length only, and whole

    def __init__(self, sequences: int, window: int, sinks: int = 0, expected: int = 0) -> None:
        self.window, self.sinks = window, sinks
        self.lengths = [0] * sequences
        self.blocks: list[list[int]] = [[] for _ in range(sequences)]
        self.expected = [expected] * sequences
        self._pass: SlotPass | None = None  # under way, of `begin`

    @abstractmethod
    def start(self, ragged: Ragged, slots: Sequence[int] | None = None) -> SlotPass:
        """A new pass; slot i of `ragged` is slot `slots[i]` of the cache (None: i)."""

    @abstractmethod
    def copy_recent(self, source: int, target: int) -> None:
        """Give a slot the tokens of another one that are not packed."""

    @abstractmethod
    def unpack(self, slot: int, block: int, tokens: int) -> None:
        """Make the first `tokens` tokens of a block, a sequence's last, recent ones."""

    @property
    def packed(self) -> list[int]:
        """How many tokens of each sequence are packed."""
        return [BLOCK_TOKENS * len(blocks) for blocks in self.blocks]

    @staticmethod
    def blocks_of(tokens: int, window: int, sinks: int) -> int:
        """How many blocks a sequence of this many tokens has."""
        return max(0, tokens - sinks - window) // BLOCK_TOKENS

    def bytes_for(self, tokens: int) -> int:
        """As `KVCache.bytes_for`, the packed blocks alone."""
        return self.store.bytes_for(self._blocks_for(tokens))

    def reserve(self, tokens: int) -> None:
        self.ended = None  # its jobs know where blocks were
        self.store.reserve(self._blocks_for(tokens))

    def _blocks_for(self, tokens: int) -> int:
        return self.sequences * self.blocks_of(tokens, self.window, self.sinks)

    def begin(self, ragged: Ragged) -> CachePass:
        """As `KVCache.begin`. A pass that has not ended is given back.

        Raises ArgumentError where that one has written over what there was.
        """
        if self._pass is not None:
            if self._pass.spoils:
                raise ArgumentError(
                    "the last forward pass on this KV cache ended half-way through; use a new cache"
                )
            self._pass.abandon()
        started = self.start(ragged)
        self.begun(started)
        return started

    def begun(self, begun: SlotPass) -> None:
        """A pass is under way."""
        self._pass, self.ended = begun, None

    def over(self, ended: SlotPass) -> None:
        """A pass has ended, or will not."""
        if self._pass is ended:
            self._pass = None

    def room(self, slot: int) -> int:
        """How many tokens a sequence gets before one completes a block."""
        unpacked = self.lengths[slot] - BLOCK_TOKENS * len(self.blocks[slot])
        return self.sinks + self.window + BLOCK_TOKENS - 1 - unpacked

    def subset(self, slots: Sequence[int]) -> SlotSubset:
        """Some slots of this cache as slots 0, 1, ... of one; for passes of many tokens.

        Its passes may be under way together with one of the cache itself over other slots.
        """
        return SlotSubset(self, tuple(slots))

    def select(self, sequences: Sequence[int]) -> None:
        self.ended = None
        kept = list(sequences)
        blocks = [list(self.blocks[i]) for i in kept]
        self.store.share(block for row in blocks for block in row)
        self.store.release(block for row in self.blocks for block in row)
        self.blocks = blocks
        self.lengths = [self.lengths[i] for i in kept]
        self.expected = [self.expected[i] for i in kept]

    def fork(self, source: int, target: int) -> None:
        """Let an empty slot remember what another one does."""
        assert not self.lengths[target]
        self.ended = None
        self.store.share(self.blocks[source])
        self.blocks[target] = list(self.blocks[source])
        self.lengths[target] = self.lengths[source]
        self.copy_recent(source, target)

    def adopt(self, slot: int, blocks: Sequence[int]) -> None:
        """Let an empty slot begin with blocks of other sequences; needs `sinks` of 0."""
        assert not self.lengths[slot]
        assert not self.sinks
        self.ended = None
        self.store.share(blocks)
        self.blocks[slot] = list(blocks)
        self.lengths[slot] = BLOCK_TOKENS * len(blocks)

    def reset(self, slot: int, expected_tokens: int = 0) -> None:
        """Forget one sequence; the next in its slot will have so many tokens."""
        self.ended = None
        self.store.release(self.blocks[slot])
        self.blocks[slot] = []
        self.lengths[slot] = 0
        self.expected[slot] = self.blocks_of(expected_tokens, self.window, self.sinks)

    def forget_each(self, tokens: Sequence[int]) -> None:
        self.ended = None
        for slot, (length, count) in enumerate(zip(self.lengths, tokens, strict=True)):
            left = max(0, length - count)
            kept, rest = divmod(max(0, left - self.sinks), BLOCK_TOKENS)
            dropped = self.blocks[slot][kept:]
            if dropped and rest:
                self.unpack(slot, dropped[0], rest)
            self.store.release(dropped)
            del self.blocks[slot][kept:]
            self.lengths[slot] = left


@dataclass(frozen=True)
class SlotSubset:
    """Slots of a cache for a pass of many tokens; its slot i is slot `slots[i]` of the cache."""

    cache: SlotCache
    slots: tuple[int, ...]
    ended: None = None  # no step of decoding

    def begin(self, ragged: Ragged) -> CachePass:
        """Make room for the new tokens of a forward pass."""
        self.cache.ended = None
        return self.cache.start(ragged, self.slots)
