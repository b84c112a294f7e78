"""A KV cache whose older tokens are packed in blocks of 64, shared where sequences share them."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qoff.errors import ArgumentError
from qoff.kernels.cpu.packed_attention.places import Moves, Origins
from qoff.kernels.layout.heads import KEYS_PER_VECTOR, HeadShape
from qoff.kernels.layout.kv_format import BLOCK_TOKENS, KVFormat
from qoff.kernels.layout.layer_cache import RUN_TOKENS, LayerCache
from qoff.kernels.layout.ragged import Ragged
from qoff.kernels.layout.rotation import rotate_values
from qoff.kernels.layout.steady import SteadyMemory
from qoff.kernels.reference.kv_blocks import dequantize_blocks
from qoff.kvcache.groups import GroupBlocks, LayerGroup, by_layer, groups_of
from qoff.kvcache.slots import SlotCache, SlotPass
from qoff.kvcache.store.base import BlockStore, BlockView, GrowingBlocks
from qoff.kvcache.store.sweep import BlockSweep

from .recent import RecentTokens, RecentWorkspace


class PackedCache(SlotCache):
    """Recent tokens in float32, older ones packed.

    shapes, forms: per layer. window: so many of the newest tokens are never packed, nor are the
    oldest `sinks`, a multiple of 16. A block is packed when 64 tokens have left the window, once
    and for all layers in the same forward pass. Sequences that were one before (`select`) share
    their blocks. attention_top: see `LayerCache.top`. stores: where the blocks of each group of
    layers lie. By default in memory that grows, and groups are those of the layers' windows, of
    which `FORGETTABLE` tokens can be forgotten at any time; without `frees` they are all kept: see
    `KVQuant.frees`. workspace: for passes of many tokens, shared with other caches; None: each pass
    has its own. lent: layers that are opened again when others have been closed; those passes have
    room of their own for each. values_rotated: see `LayerCache`. Raises ArgumentError for `sinks`
    with layers that attend to a sliding window.
    """

    def __init__(
        self,
        shapes: Sequence[HeadShape],
        forms: Sequence[KVFormat],
        sequences: int,
        *,
        window: int = 64,
        sinks: int = 0,
        attention_top: float = 1.0,
        values_rotated: bool = False,
        frees: bool = True,
        stores: Mapping[LayerGroup, BlockStore] | None = None,
        workspace: RecentWorkspace | None = None,
        lent: Collection[int] = (),
    ) -> None:
        if sinks % KEYS_PER_VECTOR or sinks < 0:
            raise ArgumentError(f"{sinks} sink tokens; use a multiple of {KEYS_PER_VECTOR}")
        if sinks and any(shape.window for shape in shapes):
            raise ArgumentError("a model with a sliding window forgets its sink tokens; use 0")
        super().__init__(sequences, window, sinks)
        self.shapes = tuple(shapes)
        self.attention_top = attention_top
        self.values_rotated = values_rotated
        if stores is None:
            stores = {
                group: GrowingBlocks(
                    [forms[i] for i in group.layers], [shapes[i].kv_heads for i in group.layers]
                )
                for group in groups_of(shapes, frees)
            }
        self.forms = tuple(forms)
        self.stores = list(stores.values())
        self.groups = [GroupBlocks(group, found, sequences) for group, found in stores.items()]
        self.place = by_layer(self.groups)
        self.workspace, self.lent = workspace, frozenset(lent)
        self.steady = SteadyMemory()
        self.recent = RecentTokens(self.shapes, sequences, self.recent_tokens(window, sinks))

    @staticmethod
    def recent_tokens(window: int, sinks: int) -> int:
        """Tokens of a sequence that there is float32 room for between passes."""
        return sinks + window + BLOCK_TOKENS

    @property
    def nbytes(self) -> int:
        return sum(store.nbytes for store in self.stores) + self.recent.nbytes

    def bytes_for(self, tokens: int) -> int:
        copied = max(t.nbytes for t in self.recent.keys)  # where sequences move to other rows
        return super().bytes_for(tokens) + self.recent.nbytes + copied

    def start(self, ragged: Ragged, slots: Sequence[int] | None = None) -> PackedPass:
        return PackedPass(self, ragged, slots)

    def select(self, sequences: Sequence[int]) -> None:
        super().select(sequences)
        self.recent.select(list(sequences))

    def copy_recent(self, source: int, target: int) -> None:
        for tensors in (self.recent.keys, self.recent.values):
            for tensor in tensors:
                tensor[target] = tensor[source]

    def unpack(self, slot: int, place: int, tokens: int) -> None:
        for layer, form in enumerate(self.forms):
            number, inner = self.place[layer]
            block = self.groups[number].blocks[slot][place]
            k, v = dequantize_blocks(self.stores[number].read(inner, block), form)
            if self.values_rotated and not form.latent:
                v = rotate_values(v, back=True)
            self.recent.write(layer, slot, self.sinks, k, v)


class PackedPass(SlotPass):
    """Its tokens in float32, and the blocks that they complete.

    New tokens go after the unpacked ones; where there is no room for that, or with `slots`, the
    unpacked tokens of the layer at hand are in the workspace meanwhile.
    """

    _cache: PackedCache

    def __init__(self, cache: PackedCache, ragged: Ragged, slots: Sequence[int] | None) -> None:
        memory = cache.steady if slots is None and ragged.is_decode else None
        super().__init__(cache, ragged if memory is None else ragged.kept_in(memory), slots)
        packed = cache.packed
        self._packed = [packed[slot] for slot in self._slots]
        self._places = ragged.positions - torch.tensor(self._packed)[ragged.slots]
        if memory is not None:
            self._places = memory.put("places", self._places)
        self._longest = int(self._places.max())
        self._apart = slots is not None or self._longest >= cache.recent.capacity
        self._unpacked = {
            span.slot: span.past + span.count - self._packed[span.slot] for span in ragged.spans
        }
        self._workspace = cache.workspace or RecentWorkspace()
        self._lent = dict[int, tuple[Tensor, Tensor]]()  # unpacked tokens, of layers that are
        self._closed = 0  # layers whose unpacked tokens are those after the pass
        sparse = cache.attention_top < 1 and ragged.is_decode
        for span in ragged.spans:
            cache.free(self._slots[span.slot])
        self._views = [
            store.view(
                [group.blocks[slot] for slot in self._slots],
                self.ragged,
                cache.sinks,
                None if memory is None else group.memory,
                sparse,
                [group.freed[slot] for slot in self._slots],
            )
            for store, group in zip(cache.stores, cache.groups, strict=True)
        ]
        self._completed = dict[int, int]()  # blocks of a slot
        self._of_blocks = dict[tuple[int, ...], Origins]()  # see `_origins`
        try:
            for span in ragged.spans:
                tokens = self._unpacked[span.slot]
                count = cache.blocks_of(tokens, cache.window, cache.sinks)
                if count:
                    slot = self._slots[span.slot]
                    self._completed[slot] = count
                    expected, length = cache.expected[slot], span.past + span.count
                    for group, new in zip(cache.groups, self._new, strict=True):
                        new[slot] = group.make(slot, count, length, expected)
        except BaseException:
            self.abandon()
            raise
        # What kernels are told of blocks, beside values in memory; None where that is not all.
        chooses = any(view.chooses for view in self._views)
        steady = memory is not None and not self._apart and not chooses
        self._told: tuple[tuple[int, ...], ...] | None = None
        if steady:
            self._told = tuple(view.told() for view in self._views)

    def replay_key(self) -> Hashable | None:
        if self._told is None:
            return None
        recent = self._cache.recent
        memory = (self.ragged.positions, self._places, *recent.keys, *recent.values)
        sizes = (self.ragged.tokens, self._longest // RUN_TOKENS)
        return (*sizes, *self._told, *(part.data_ptr() for part in memory))

    @property
    def moves(self) -> bool:
        return any(view.moves for view in self._views)

    @property
    def in_place(self) -> bool:
        return all(store.in_place for store in self._cache.stores)

    def layers_key(self) -> Hashable | None:
        cache, recent = self._cache, self._cache.recent
        if not self.in_place or cache.lent:
            return None
        blocks = (memory for store in cache.stores for memory in store.memory)
        own = (*recent.keys, *recent.values, *blocks)
        return (self._apart, *(part.data_ptr() for part in own))

    def arrive(self, layer: int) -> Hashable:
        view, inner = self._of(layer)
        return view.arrive(inner)

    def begin_sweep(self) -> BlockSweep | None:
        return next(view for view in self._views if view.moves).begin_sweep()

    def sweep(self, layer: int, sweep: BlockSweep) -> None:
        view, inner = self._of(layer)
        view.sweep(inner, sweep)

    def prefetch(self, layer: int) -> None:
        view, inner = self._of(layer)
        view.prefetch(inner)

    def open(self, layer: int) -> LayerCache:
        view, inner = self._of(layer)
        there = layer in self._lent
        keys, values = self._tokens(layer)
        if self._apart and not there and len(self._unmoved):
            recent = self._cache.recent
            here = recent.keys[layer], recent.values[layer]
            self._move_tokens(here, (keys, values), self._unmoved)
        return LayerCache(
            keys,
            values,
            self._places,
            self._longest,
            view.open(inner),
            top=self._cache.attention_top,
            values_rotated=self._cache.values_rotated,
        )

    def close(self, layer: int) -> None:
        """Let go of the packed tokens; leave the unpacked ones of a workspace in the cache."""
        view, inner = self._of(layer)
        view.close(inner)
        if self._apart and layer not in self._lent:
            self._pack(layer)
            self._closed += 1

    def end(self) -> None:
        """Pack what is complete; without a workspace no unpacked token has moved so far."""
        late = list(self._lent)
        if not self._apart and self._completed:
            late = list(range(len(self._cache.shapes)))
        self._closed += len(late)
        with _deferring() if late and self.in_place else nullcontext():
            for layer in late:
                self._pack(layer)
        self._lent.clear()
        super().end()
        if self._told is not None and not self._completed and not self.moves:
            self._cache.ended = self

    def steps_ahead(self, ragged: Ragged) -> int:
        cache, longest = self._cache, self._longest + 1
        if not ragged.goes_on(self.ragged, cache.lengths):
            return 0
        completes = cache.recent_tokens(cache.window, cache.sinks) - 1  # a block, with this place
        return min(completes - longest, -longest % RUN_TOKENS)

    def counters(self) -> list[Tensor]:
        counters = [number for view in self._views for number in view.counters()]
        return [self.ragged.positions, self._places, *counters]

    def advance(self, steps: int) -> None:
        self._cache.lengthen(self.ragged, steps)
        self._longest += steps

    @property
    def spoils(self) -> bool:
        return self._closed > 0

    def abandon(self) -> None:
        for view in self._views:
            view.abandon()
        super().abandon()

    def _of(self, layer: int) -> tuple[BlockView, int]:
        """The blocks of a layer's group, and its place there."""
        number, inner = self._cache.place[layer]
        return self._views[number], inner

    def _tokens(self, layer: int) -> tuple[Tensor, Tensor]:
        cache = self._cache
        if not self._apart:
            return cache.recent.keys[layer], cache.recent.values[layer]
        room = len(self._slots), self._longest + 1
        if layer not in cache.lent:
            return self._workspace.take(cache.shapes[layer], *room, least=self._widest)
        if layer not in self._lent:
            self._lent[layer] = RecentWorkspace().take(cache.shapes[layer], *room)
        return self._lent[layer]

    def _pack(self, layer: int) -> None:
        """Pack new blocks of a layer, and put what is left unpacked at its place in the cache."""
        cache, tokens = self._cache, self._tokens(layer)
        number, inner = cache.place[layer]

        def fill(places: Sequence[int], records: Tensor, numbers: Sequence[int]) -> None:
            # A store writes them in an order of its own.
            self._pack_blocks(layer, tokens, self._origins(number, places, numbers), records)

        kept = [block for new in self._new[number].values() for block in new.kept]
        if kept:
            cache.stores[number].fill(inner, kept, fill)
        if len(self._moves):
            recent = cache.recent
            here = recent.keys[layer], recent.values[layer]
            self._move_tokens(tokens, here, self._moves)

    def _pack_blocks(
        self, layer: int, tokens: tuple[Tensor, Tensor], origins: Origins, records: Tensor
    ) -> None:
        from qoff.kernels.cpu.packed_attention.pack import pack_blocks

        cache = self._cache
        form = cache.forms[layer]
        pack_blocks(*tokens, form, origins, records, rotated=cache.values_rotated)

    def _move_tokens(
        self, tokens: tuple[Tensor, Tensor], to: tuple[Tensor, Tensor], moves: Moves
    ) -> None:
        from qoff.kernels.cpu.packed_attention.pack import move_tokens

        move_tokens(tokens, to, moves)

    def _origins(self, group: int, places: Sequence[int], numbers: Sequence[int]) -> Origins:
        """Where the tokens of some of a group's new blocks are, and these; one for all layers."""
        key = group, *places, *numbers
        if key not in self._of_blocks:
            rows = self._first_tokens[group][list(places)]
            self._of_blocks[key] = Origins(np.column_stack((rows, np.array(numbers, np.int64))))
        return self._of_blocks[key]

    @cached_property
    def _first_tokens(self) -> list[NDArray[np.int64]]:
        """Of each group's new blocks, slot and place of the first token, and whether it opens."""
        first, found = self._cache.sinks, list[NDArray[np.int64]]()
        for new in self._new:
            rows = [
                (place, first + BLOCK_TOKENS * i, first + self._packed[place] + i == 0)
                for place in self._unpacked
                if (made := new.get(self._slots[place])) is not None
                for i in range(made.skipped, len(made.numbers))
            ]
            found.append(np.array(rows, np.int64).reshape(-1, 3))
        return found

    @cached_property
    def _widest(self) -> int:
        """Floats that the unpacked tokens of a layer take at most, in the workspace."""
        shapes, room = self._cache.shapes, (len(self._slots), self._longest + 1)
        widths = [s for layer, s in enumerate(shapes) if layer not in self._cache.lent]
        return max((RecentWorkspace.floats_for(shape, *room) for shape in widths), default=0)

    @cached_property
    def _unmoved(self) -> Moves:
        """Unpacked tokens that were there before, which come into the workspace."""
        rows = [
            (self._slots[span.slot], 0, span.past - self._packed[span.slot], span.slot, 0)
            for span in self.ragged.spans
            if span.past > self._packed[span.slot]
        ]
        return _moves(rows)

    @cached_property
    def _moves(self) -> Moves:
        """Unpacked tokens that go from where this pass has them to their places: `move_tokens`."""
        first, rows = self._cache.sinks, list[tuple[int, int, int, int, int]]()
        for slot, tokens in self._unpacked.items():
            to = self._slots[slot]
            blocks = self._completed.get(to, 0)
            done = first + BLOCK_TOKENS * blocks
            if self._apart and first:
                rows.append((slot, 0, min(first, tokens), to, 0))
            if tokens > done and (blocks or self._apart):
                rows.append((slot, done, tokens - done, to, first))
        return _moves(rows)


def _moves(rows: list[tuple[int, int, int, int, int]]) -> Moves:
    return Moves(np.array(rows, np.int64).reshape(-1, 5))


def _deferring() -> AbstractContextManager[None]:
    from qoff.kernels.cpu.jit.recorder import deferring

    return deferring()
