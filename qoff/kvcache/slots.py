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
from .groups import GroupBlocks, NewBlocks

PADDING = 2  # see `SlotCache`; plans have room for it


class SlotPass(CachePass):
    """A forward pass on a cache; slot i of `ragged` is slot `slots[i]` of the cache (None: i)."""

    def __init__(self, cache: SlotCache, ragged: Ragged, slots: Sequence[int] | None) -> None:
        self._cache: SlotCache = proxy(cache)  # which may keep the pass when it has ended
        self.ragged = ragged
        self._slots = range(cache.sequences) if slots is None else slots
        # Blocks that it fills, of each group of layers, by slot of the cache.
        self._new: list[dict[int, NewBlocks]] = [{} for _ in cache.groups]

    def end(self) -> None:
        cache = self._cache
        for group, new in zip(cache.groups, self._new, strict=True):
            for slot, blocks in new.items():
                group.add(slot, blocks)
            new.clear()
        for span in self.ragged.spans:
            slot = self._slots[span.slot]
            cache.lengths[slot] += span.count
            cache.free(slot)
        cache.over(self)

    def abandon(self) -> None:
        for group, new in zip(self._cache.groups, self._new, strict=True):
            for blocks in new.values():
                group.store.release(blocks.kept)
            new.clear()
        self._cache.over(self)

    @property
    @abstractmethod
    def spoils(self) -> bool:
        """Whether the cache is worthless if this pass does not end."""


class SlotCache(KVCache):
    """Sequences in slots, each with packed blocks and recent tokens that are not packed.

    The newest `window` tokens are never packed, nor are the oldest `sinks`. groups: of layers, each
    with its blocks, of which those that none of the layers will read are free. padding: how many
    times the tokens of prompts that a pass reads the longest of them may be, as often as there are
    prompts. expected: how many tokens each sequence will have, as far as known.
    """

    groups: Sequence[GroupBlocks]
    equal_prompts: bool = False  # whether a pass may read prompts of one length only, and whole
    padding: int = PADDING

    def __init__(self, sequences: int, window: int, sinks: int = 0, expected: int = 0) -> None:
        self.window, self.sinks = window, sinks
        self.lengths = [0] * sequences
        self.expected = [expected] * sequences
        self._pass: SlotPass | None = None  # under way, of `begin`
        self._lost = False

    @abstractmethod
    def start(self, ragged: Ragged, slots: Sequence[int] | None = None) -> SlotPass:
        """A new pass; slot i of `ragged` is slot `slots[i]` of the cache (None: i)."""

    @abstractmethod
    def copy_recent(self, source: int, target: int) -> None:
        """Give a slot the tokens of another one that are not packed."""

    @abstractmethod
    def unpack(self, slot: int, place: int, tokens: int) -> None:
        """Make the first `tokens` tokens of the blocks at a place recent ones, the last there."""

    @property
    def blocks(self) -> list[list[int]]:
        """Of each sequence, oldest first; of layers that keep all of them, if there are any."""
        return self.groups[0].blocks

    def free(self, slot: int) -> None:
        """Give back the blocks of a sequence that it will not read."""
        for group in self.groups:
            group.free(slot, self.lengths[slot])

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
        return sum(group.store.bytes_for(self._most(group, tokens)) for group in self.groups)

    def reserve(self, tokens: int) -> None:
        self.ended = None  # its jobs know where blocks were
        for group in self.groups:
            group.store.reserve(self._most(group, tokens))

    def _most(self, group: GroupBlocks, tokens: int) -> int:
        """The most blocks of a group, with those that a pass makes beside those that it reads."""
        most = self.blocks_of(tokens, self.window, self.sinks)
        if not group.group.reach:
            return self.sequences * most
        most = min(most, 2 * group.group.blocks_at_once(tokens, self.window))
        return self.sequences * most + 1  # a GPU has a spare one in a pass

    def begin(self, ragged: Ragged) -> CachePass:
        """As `KVCache.begin`. A pass that has not ended is given back.

        Raises ArgumentError where that one has written over what there was.
        """
        if self._lost or (self._pass is not None and self._pass.spoils):
            raise ArgumentError(
                "the last forward pass on this KV cache ended half-way through; use a new cache"
            )
        if self._pass is not None:
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
        for group in self.groups:
            group.select(kept)
        self.lengths = [self.lengths[i] for i in kept]
        self.expected = [self.expected[i] for i in kept]

    def fork(self, source: int, target: int) -> None:
        """Let an empty slot remember what another one does."""
        assert not self.lengths[target]
        self.ended = None
        for group in self.groups:
            group.copy(source, target)
        self.lengths[target] = self.lengths[source]
        self.copy_recent(source, target)

    def adopt(self, slot: int, blocks: Sequence[int]) -> None:
        """Let an empty slot begin with blocks of other sequences; needs `sinks` of 0, one group."""
        (group,) = self.groups
        assert not self.lengths[slot]
        assert not self.sinks
        assert not group.group.reach
        self.ended = None
        group.store.share(blocks)
        group.blocks[slot] = list(blocks)
        self.lengths[slot] = BLOCK_TOKENS * len(blocks)

    def reset(self, slot: int, expected_tokens: int = 0) -> None:
        """Forget one sequence; the next in its slot will have so many tokens."""
        self.ended = None
        for group in self.groups:
            group.shorten(slot, 0)
        self.lengths[slot] = 0
        self.expected[slot] = self.blocks_of(expected_tokens, self.window, self.sinks)

    def lose(self) -> None:
        self._lost = True

    def can_forget(self, tokens: Sequence[int]) -> bool:
        for slot, (length, count) in enumerate(zip(self.lengths, tokens, strict=True)):
            left = length - count
            if count and left > 0:
                for group in self.groups:
                    if not group.group.readable(group.freed[slot], left):
                        return False
        return True

    def forget_each(self, tokens: Sequence[int]) -> None:
        self.ended = None
        if not self.can_forget(tokens):
            raise ArgumentError(
                f"layers with a sliding window have only their newest tokens: {max(tokens)} tokens "
                "cannot be forgotten; start with an empty cache"
            )
        for slot, (length, count) in enumerate(zip(self.lengths, tokens, strict=True)):
            left = max(0, length - count)
            kept, rest = divmod(max(0, left - self.sinks), BLOCK_TOKENS)
            if rest and kept < len(self.blocks[slot]):
                self.unpack(slot, kept, rest)
            for group in self.groups:
                group.shorten(slot, kept)
            self.lengths[slot] = left
        if not any(self.lengths):
            self._lost = False
            if self._pass is not None:  # left half-way; what it wrote over is forgotten
                self._pass.abandon()


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
