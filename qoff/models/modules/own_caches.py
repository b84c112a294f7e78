"""Slots of sequences that have a cache of transformers each, whatever its layers hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

from qoff.kernels.layout.ragged import Ragged
from qoff.kvcache import PackedCache
from qoff.kvcache.host.packed import PackedPass

from .sequence_memory import cache_bytes, compact


class OwnCaches(PackedCache):
    """Nothing is packed. new: makes an empty cache of transformers; the others are `PackedCache`'s.

    Passes compute each sequence alone, so that prompts of any lengths are read together.
    """

    def __init__(self, *arguments: Any, new: Callable[[], Any], **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.new = new
        self.padding = self.sequences
        self.caches: list[Any] = [None] * self.sequences  # None: of an empty slot

    @property
    def nbytes(self) -> int:
        caches = [one for one in self.caches if one is not None]
        return super().nbytes + sum(sum(cache_bytes(one)) for one in caches)

    def start(self, ragged: Ragged, slots: Sequence[int] | None = None) -> OwnCachesPass:
        return OwnCachesPass(self, ragged, slots)

    def copy_recent(self, source: int, target: int) -> None:
        self.caches[target] = deepcopy(self.caches[source])

    def reset(self, slot: int, expected_tokens: int = 0) -> None:
        super().reset(slot, expected_tokens)
        self.caches[slot] = None


class OwnCachesPass(PackedPass):
    """A forward pass of sequences that are computed alone.

    states: their caches, in the order of `ragged`. Those that go on are written over.
    """

    _cache: OwnCaches

    def __init__(
        self, cache: OwnCaches, ragged: Ragged, slots: Sequence[int] | None = None
    ) -> None:
        super().__init__(cache, ragged, slots)
        self._rows = [self._slots[span.slot] for span in ragged.spans]
        self.states = [
            cache.caches[row] if span.past else cache.new()
            for row, span in zip(self._rows, ragged.spans, strict=True)
        ]

    @property
    def spoils(self) -> bool:
        return any(span.past for span in self.ragged.spans)

    def prefetch(self, layer: int) -> None:
        """Everything is there."""

    def compact_prompts(self) -> None:
        """Let the layers that are computed keep no more of a prompt than they remember."""
        for states, span in zip(self.states, self.ragged.spans, strict=True):
            if span.count > 1:
                compact(states)

    def end(self) -> None:
        for row, states in zip(self._rows, self.states, strict=True):
            compact(states)
            self._cache.caches[row] = states
        super().end()
