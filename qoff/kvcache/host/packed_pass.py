"""One forward pass on a packed cache: where new tokens go, and which blocks they complete."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from qoff.kernels.layout.heads import KEYS_PER_VECTOR, HeadShape
from qoff.kernels.layout.kv_format import BLOCK_TOKENS
from qoff.kernels.layout.layer_cache import LayerCache
from qoff.kernels.layout.ragged import Ragged
from qoff.kernels.layout.rotation import rotate_values
from qoff.kernels.reference.kv_blocks import quantize_blocks
from qoff.kvcache.slots import SlotPass
from qoff.kvcache.store.base import BlockStore

from .recent import RecentTokens, RecentWorkspace


class PackedState(Protocol):
    """What a pass reads and changes of its cache."""

    shapes: tuple[HeadShape, ...]
    window: int
    sinks: int
    attention_top: float
    values_rotated: bool
    lengths: list[int]
    blocks: list[list[int]]
    expected: list[int]
    store: BlockStore
    recent: RecentTokens
    workspace: RecentWorkspace

    @staticmethod
    def blocks_of(tokens: int, window: int, sinks: int) -> int: ...

    def over(self, ended: SlotPass) -> None: ...


class PackedPass(SlotPass):
    """A pass of the sequences of `ragged`, in slots of the cache or in places of `slots`.

    New tokens go after the unpacked ones; where there is no room for that, or with `slots`, the
    unpacked tokens of the layer at hand are in the cache's workspace meanwhile.
    """

    def __init__(
        self, cache: PackedState, ragged: Ragged, slots: Sequence[int] | None = None
    ) -> None:
        self._cache = cache
        self._ragged = ragged
        self._slots = range(len(cache.lengths)) if slots is None else slots  # of the cache
        rows = [cache.blocks[slot] for slot in self._slots]
        self._packed = [BLOCK_TOKENS * len(blocks) for blocks in rows]
        self._places = ragged.positions - torch.tensor(self._packed)[ragged.slots]
        self._longest = int(self._places.max())
        self._apart = slots is not None or self._longest >= cache.recent.capacity
        self._unpacked = {
            span.slot: span.past + span.count - self._packed[span.slot] for span in ragged.spans
        }
        self._new: dict[int, list[int]] = {}  # blocks that leave the window with this pass
        self._closed = 0  # layers whose unpacked tokens are those after the pass
        self._view = cache.store.view(rows, ragged, cache.sinks)
        self._allocate()

    def prefetch(self, layer: int) -> None:
        """Start to bring the packed tokens of a layer."""
        self._view.prefetch(layer)

    def open(self, layer: int) -> LayerCache:
        """What the attention of a layer reads and appends to."""
        keys, values = self._tokens(layer)
        if self._apart:
            self._copy_recent(layer, keys, values)
        return LayerCache(
            keys,
            values,
            self._places,
            self._longest,
            self._view.open(layer),
            top=self._cache.attention_top,
            values_rotated=self._cache.values_rotated,
        )

    def close(self, layer: int) -> None:
        """Let go of the packed tokens; leave the unpacked ones of a workspace in the cache."""
        self._view.close(layer)
        if self._apart:
            self._pack(layer)
            self._closed += 1

    def end(self) -> None:
        """Pack what is complete; without a workspace no unpacked token has moved so far."""
        if not self._apart and self._new:
            for layer in range(len(self._cache.shapes)):
                self._pack(layer)
        cache, slots = self._cache, self._slots
        for slot, blocks in self._new.items():
            cache.blocks[slots[slot]] += blocks
        self._new = {}
        for span in self._ragged.spans:
            cache.lengths[slots[span.slot]] += span.count
        cache.over(self)

    @property
    def spoils(self) -> bool:
        return self._closed > 0

    def abandon(self) -> None:
        """Let go of all that was brought and of the new blocks."""
        self._view.abandon()
        for blocks in self._new.values():
            self._cache.store.release(blocks)
        self._new = {}
        self._cache.over(self)

    def _allocate(self) -> None:
        cache = self._cache
        try:
            for slot, tokens in self._unpacked.items():
                count = cache.blocks_of(tokens, cache.window, cache.sinks)
                if count:
                    old = self._packed[slot] // BLOCK_TOKENS
                    expected = cache.expected[self._slots[slot]]
                    self._new[slot] = cache.store.allocate(range(old, old + count), expected)
        except BaseException:
            self.abandon()
            raise

    def _tokens(self, layer: int) -> tuple[Tensor, Tensor]:
        cache = self._cache
        if not self._apart:
            return cache.recent.keys[layer], cache.recent.values[layer]
        return cache.workspace.take(cache.shapes[layer], len(self._slots), self._longest + 1)

    def _copy_recent(self, layer: int, to_keys: Tensor, to_values: Tensor) -> None:
        recent = self._cache.recent
        for span in self._ragged.spans:
            slot = self._slots[span.slot]
            tokens = span.past - self._packed[span.slot]
            vectors = -(-tokens // KEYS_PER_VECTOR)
            to_keys[span.slot, :, :vectors] = recent.keys[layer][slot, :, :vectors]
            to_values[span.slot, :, :tokens] = recent.values[layer][slot, :, :tokens]

    def _pack(self, layer: int) -> None:
        """Pack new blocks of a layer, and put what is left unpacked at its place in the cache."""
        cache, (keys, values) = self._cache, self._tokens(layer)
        first = cache.sinks
        for slot, tokens in self._unpacked.items():
            blocks = self._new.get(slot, [])
            done = first + BLOCK_TOKENS * len(blocks)
            if blocks:
                k = keys[slot, :, first // KEYS_PER_VECTOR : done // KEYS_PER_VECTOR]
                k = k.transpose(2, 3).flatten(1, 2)
                v = values[slot, :, first:done]
                # [kv_heads, tokens, D] -> [blocks, kv_heads, 64, D]
                k, v = (x.unflatten(1, (-1, BLOCK_TOKENS)).transpose(0, 1) for x in (k, v))
                if cache.values_rotated:
                    v = rotate_values(v)
                position = first + self._packed[slot] + BLOCK_TOKENS * torch.arange(len(blocks))
                opening = (position == 0)[:, None]  # [blocks, 1]; none where there are sinks
                records = quantize_blocks(k, v, cache.store.forms[layer], opening)
                cache.store.write(layer, blocks, records)
            if self._apart:
                self._keep(layer, slot, 0, min(first, tokens), 0)
            if tokens > done and (blocks or self._apart):
                self._keep(layer, slot, done, tokens, first)

    def _keep(self, layer: int, slot: int, start: int, stop: int, place: int) -> None:
        """Move unpacked tokens from where this pass has them to a place in the cache."""
        if stop <= start:
            return
        recent, (keys, values) = self._cache.recent, self._tokens(layer)
        to = self._slots[slot]
        first, last = start // KEYS_PER_VECTOR, -(-stop // KEYS_PER_VECTOR)
        rest = keys[slot, :, first:last].clone()  # it may overlap with where it goes
        at = place // KEYS_PER_VECTOR
        recent.keys[layer][to, :, at : at + last - first] = rest
        rest = values[slot, :, start:stop].clone()
        recent.values[layer][to, :, place : place + stop - start] = rest
