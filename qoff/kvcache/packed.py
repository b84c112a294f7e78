"""A KV cache whose older tokens are 4- or 8-bit blocks of 64, shared where sequences share them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qoff.errors import ArgumentError
from qoff.kernels.heads import KEYS_PER_VECTOR, HeadShape, cache_shapes
from qoff.kernels.kv_format import BLOCK_TOKENS, KVFormat
from qoff.kernels.layer_cache import BlockTable, LayerCache, PackedTokens
from qoff.kernels.ragged import Ragged
from qoff.kernels.reference_kv import dequantize_blocks, quantize_blocks

from .base import KVCache
from .blocks import BlockAllocator

_GROWTH_BLOCKS = 16


class PackedCache(KVCache):
    """Recent tokens in float32, older ones packed; grows as the sequences do.

    shapes, forms: per layer. window: so many of the newest tokens are never packed. A block is
    packed when 64 tokens have left the window, once and for all layers in the same forward pass.
    Sequences that were one before (`select`) share their blocks.
    """

    def __init__(
        self,
        shapes: Sequence[HeadShape],
        forms: Sequence[KVFormat],
        sequences: int,
        *,
        window: int = 64,
    ) -> None:
        self._shapes, self._forms = tuple(shapes), tuple(forms)
        self._window = window
        self.lengths = [0] * sequences
        self._blocks: list[list[int]] = [[] for _ in range(sequences)]
        self._allocator = BlockAllocator(0)
        self._pools = [
            torch.empty(0, shape.kv_heads, form.nbytes, dtype=torch.uint8)
            for shape, form in zip(self._shapes, self._forms, strict=True)
        ]
        self._recent = _Recent(self._shapes, sequences, window + BLOCK_TOKENS)
        self._pass: _Pass | None = None

    @property
    def nbytes(self) -> int:
        return sum(pool.nbytes for pool in self._pools) + self._recent.nbytes

    @property
    def packed(self) -> list[int]:
        """How many tokens of each sequence are packed."""
        return [BLOCK_TOKENS * len(blocks) for blocks in self._blocks]

    def begin(self, ragged: Ragged) -> None:
        if self._pass is not None:
            self._pass.abandon()
        self._pass = _Pass(self, ragged)

    def open(self, layer: int) -> LayerCache:
        return self._current.open(layer)

    def close(self, layer: int) -> None:
        self._current.close(layer)

    def end(self, ragged: Ragged) -> None:
        self._current.end()
        self._pass = None
        super().end(ragged)

    def select(self, sequences: Sequence[int]) -> None:
        kept = list(sequences)
        blocks = [list(self._blocks[i]) for i in kept]
        for row in blocks:
            self._allocator.share(row)
        for row in self._blocks:
            self._allocator.release(row)
        self._blocks = blocks
        self._recent.select(kept)
        self.lengths = [self.lengths[i] for i in kept]

    def forget(self, tokens: int) -> None:
        for slot, length in enumerate(self.lengths):
            left = max(0, length - tokens)
            self._unpack(slot, left)
            self.lengths[slot] = left

    @property
    def _current(self) -> _Pass:
        if self._pass is None:
            raise ArgumentError("no forward pass has begun on this cache")
        return self._pass

    def _unpack(self, slot: int, left: int) -> None:
        """Keep the blocks of the first `left` tokens; tokens of a cut block become recent ones."""
        kept = left // BLOCK_TOKENS
        dropped = self._blocks[slot][kept:]
        if not dropped:
            return
        if left % BLOCK_TOKENS:
            for layer, form in enumerate(self._forms):
                k, v = dequantize_blocks(self._pools[layer][dropped[0]], form)
                self._recent.write(layer, slot, k, v)
        self._allocator.release(dropped)
        del self._blocks[slot][kept:]

    def _allocate(self, count: int) -> list[int]:
        if count > self._allocator.free:
            capacity = self._allocator.capacity
            capacity += max(count, _GROWTH_BLOCKS, capacity // 2)
            self._allocator.grow(capacity)
            for layer, pool in enumerate(self._pools):
                grown = torch.empty(capacity, *pool.shape[1:], dtype=torch.uint8)
                grown[: len(pool)] = pool
                self._pools[layer] = grown
        return [self._allocator.allocate() for _ in range(count)]


class _Recent:
    """The tokens of each sequence that are not packed, of every layer, from place 0 on."""

    def __init__(self, shapes: Sequence[HeadShape], sequences: int, capacity: int) -> None:
        self.shapes = shapes
        self.capacity = -(-capacity // KEYS_PER_VECTOR) * KEYS_PER_VECTOR
        both = [cache_shapes(sequences, shape, self.capacity) for shape in shapes]
        self.keys = [torch.empty(keys) for keys, _ in both]
        self.values = [torch.empty(values) for _, values in both]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (*self.keys, *self.values))

    def select(self, sequences: Sequence[int]) -> None:
        for tensors in (self.keys, self.values):
            tensors[:] = [t[sequences].contiguous() for t in tensors]

    def write(self, layer: int, slot: int, k: Tensor, v: Tensor) -> None:
        """Put tokens, k and v [kv_heads, tokens, D], at place 0 on; a multiple of 16 of them."""
        tokens = k.shape[1]
        keys = k.unflatten(1, (-1, KEYS_PER_VECTOR)).transpose(2, 3)
        self.keys[layer][slot, :, : tokens // KEYS_PER_VECTOR] = keys
        self.values[layer][slot, :, :tokens] = v


class _Pass:
    """One forward pass: where the new tokens go, and which blocks they complete."""

    def __init__(self, cache: PackedCache, ragged: Ragged) -> None:
        self._cache = cache
        packed = cache.packed
        self._counts = packed
        self._places = ragged.positions - torch.tensor(packed)[ragged.slots]
        self._longest = int(self._places.max())
        self._table = self._block_table(ragged) if any(packed) else None
        self._unpacked = {
            span.slot: span.past + span.count - packed[span.slot] for span in ragged.spans
        }
        # New blocks of each slot: those that leave the window with this pass.
        counts = {
            slot: max(0, tokens - cache._window) // BLOCK_TOKENS
            for slot, tokens in self._unpacked.items()
        }
        self._new = {slot: cache._allocate(count) for slot, count in counts.items() if count}
        recent = cache._recent
        self._scratch: tuple[Tensor, Tensor] | None = None
        if self._longest >= recent.capacity:
            capacity = -(-(self._longest + 1) // KEYS_PER_VECTOR) * KEYS_PER_VECTOR
            shapes = cache_shapes(len(packed), recent.shapes[0], capacity)
            self._scratch = (torch.empty(shapes[0]), torch.empty(shapes[1]))
        self._ragged = ragged
        self._closed = 0  # layers whose recent tokens are those after the pass

    def open(self, layer: int) -> LayerCache:
        cache = self._cache
        keys, values = cache._recent.keys[layer], cache._recent.values[layer]
        if self._scratch is not None:
            self._copy_recent(keys, values, *self._scratch)
            keys, values = self._scratch
        packed: tuple[PackedTokens, ...] = ()
        if self._table is not None:
            packed = (PackedTokens(cache._forms[layer], cache._pools[layer], self._table),)
        return LayerCache(keys, values, self._places, self._longest, packed)

    def close(self, layer: int) -> None:
        """Pack the blocks this pass completes, and leave the rest at place 0 on."""
        if self._scratch is None:
            return  # what is recent stays in its place until the pass has ended
        self._pack(layer, *self._scratch)
        self._closed += 1

    def abandon(self) -> None:
        """Give back what a pass that did not end has taken."""
        if self._closed:
            raise ArgumentError(
                "the last forward pass on this KV cache ended half-way through; use a new cache"
            )
        for blocks in self._new.values():
            self._cache._allocator.release(blocks)

    def end(self) -> None:
        cache = self._cache
        if self._scratch is None and self._new:
            for layer in range(len(cache._forms)):
                self._pack(layer, cache._recent.keys[layer], cache._recent.values[layer])
        for slot, blocks in self._new.items():
            cache._blocks[slot] += blocks

    def _block_table(self, ragged: Ragged) -> BlockTable:
        rows = self._cache._blocks
        table = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int32)
        for row, blocks in zip(table, rows, strict=True):
            row[: len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        return BlockTable(table, self._counts, ragged)

    def _copy_recent(
        self, keys: Tensor, values: Tensor, to_keys: Tensor, to_values: Tensor
    ) -> None:
        for span in self._ragged.spans:
            tokens = span.past - self._counts[span.slot]
            vectors = -(-tokens // KEYS_PER_VECTOR)
            to_keys[span.slot, :, :vectors] = keys[span.slot, :, :vectors]
            to_values[span.slot, :, :tokens] = values[span.slot, :, :tokens]

    def _pack(self, layer: int, keys: Tensor, values: Tensor) -> None:
        cache = self._cache
        for slot, tokens in self._unpacked.items():
            blocks = self._new.get(slot, [])
            done = BLOCK_TOKENS * len(blocks)
            if blocks:
                k = keys[slot, :, : done // KEYS_PER_VECTOR].transpose(2, 3).flatten(1, 2)
                v = values[slot, :, :done]
                # [kv_heads, done, D] -> [blocks, kv_heads, 64, D]
                k, v = (x.unflatten(1, (-1, BLOCK_TOKENS)).transpose(0, 1) for x in (k, v))
                cache._pools[layer][blocks] = quantize_blocks(k, v, cache._forms[layer])
            if tokens > done and (blocks or self._scratch is not None):
                first, last = done // KEYS_PER_VECTOR, -(-tokens // KEYS_PER_VECTOR)
                rest = keys[slot, :, first:last].clone()  # it may overlap with where it goes
                cache._recent.keys[layer][slot, :, : last - first] = rest
                rest = values[slot, :, done:tokens].clone()
                cache._recent.values[layer][slot, :, : tokens - done] = rest
