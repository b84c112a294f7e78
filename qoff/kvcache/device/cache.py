"""The packed KV cache in the memory of a GPU, for the Triton ops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from qoff.kernels.layout.heads import HeadShape
from qoff.kernels.layout.kv_format import BLOCK_TOKENS, KVFormat
from qoff.kernels.layout.ragged import Ragged
from qoff.kernels.reference.kv_blocks import dequantize_blocks
from qoff.kernels.upload import on_device
from qoff.kvcache.groups import (
    FORGETTABLE,
    GroupBlocks,
    LayerGroup,
    by_layer,
    layer_groups,
    one_group,
)
from qoff.kvcache.slots import SlotCache
from qoff.kvcache.store.placement import DEVICE
from qoff.kvcache.store.pool import BlockPool

from .blocks import DeviceBlocks
from .cache_pass import DeviceCachePass
from .tables import DeviceTables


class DeviceCache(SlotCache):
    """Recent tokens in float16 or bfloat16 rings, older ones packed in blocks.

    shapes, forms: per layer. window: so many of the newest tokens are never packed; a ring has room
    for these and one block more. A block is packed when 64 tokens have left the window, in the pass
    in which they do, whose attention still sees them unpacked. Sequences that were one before
    (`select`) share their blocks. capacity: tokens of each sequence that there is room for at once.
    steady: what kernels are told at decode takes few values, so that it can be recorded and
    replayed. values_rotated: see `DeviceLayerCache`. store: blocks of all layers, all of which are
    kept, that this cache shares with others; stores: of groups of layers instead. Some of the first
    one's may be offloaded. By default it has its own, which grow, of groups by the layers' windows,
    and `FORGETTABLE` tokens can be forgotten at any time; without `frees` all blocks are kept.
    """

    def __init__(
        self,
        shapes: Sequence[HeadShape],
        forms: Sequence[KVFormat],
        sequences: int,
        *,
        window: int = 64,
        capacity: int = 0,
        steady: bool = False,
        values_rotated: bool = False,
        device: torch.device,
        dtype: torch.dtype = torch.float16,
        frees: bool = True,
        store: DeviceBlocks | None = None,
        stores: Mapping[LayerGroup, DeviceBlocks] | None = None,
    ) -> None:
        super().__init__(sequences, window, expected=self.blocks_of(capacity, window, 0))
        self.steady, self.values_rotated = steady, values_rotated
        self.group = max(shape.heads // shape.kv_heads for shape in shapes)
        self.forms = tuple(forms)
        if store is not None:
            stores = {one_group(shapes)[0]: store}
        elif stores is None:
            stores = {
                group: _growing(group, shapes, forms, self._most_each(group, capacity), device)
                for group in (layer_groups(shapes, FORGETTABLE) if frees else one_group(shapes))
            }
        self.stores = list(stores.values())
        self.groups = [GroupBlocks(group, found, sequences) for group, found in stores.items()]
        self.place = by_layer(self.groups)
        self.tables = [DeviceTables(sequences, device) for _ in self.groups]
        self.ring = window + BLOCK_TOKENS  # tokens that there is room for unpacked
        rings = [(sequences, self.ring, shape.kv_heads, shape.head_dim) for shape in shapes]
        self.recent_k = [torch.empty(ring, dtype=dtype, device=device) for ring in rings]
        self.recent_v = [
            torch.empty(*ring[:3], form.own_value_dim, dtype=dtype, device=device)
            for ring, form in zip(rings, self.forms, strict=True)
        ]
        # What kernels are told of every cache like this one.
        self.kind = repr((rings, self.forms, [*stores], dtype, values_rotated))

    @property
    def store(self) -> DeviceBlocks:
        """Of the first group of layers."""
        return self.stores[0]

    def _most_each(self, group: LayerGroup, tokens: int) -> int:
        most = self.sequences * self.blocks_of(tokens, self.window, 0)
        if group.reach:
            most = min(most, self.sequences * group.blocks_at_once(tokens, self.window))
        return most

    @staticmethod
    def recent_bytes(
        shapes: Sequence[HeadShape], sequences: int, window: int, dtype: torch.dtype
    ) -> int:
        """Bytes of the rings of a cache."""
        own = (1 if shape.latent else 2 for shape in shapes)
        values = sum(
            count * shape.kv_heads * shape.head_dim
            for count, shape in zip(own, shapes, strict=True)
        )
        return sequences * (window + BLOCK_TOKENS) * values * dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self._beside_blocks + sum(store.nbytes for store in self.stores)

    @property
    def _beside_blocks(self) -> int:
        rings = sum(t.nbytes for t in (*self.recent_k, *self.recent_v))
        away = 0 if self.store.write_back is None else self.store.write_back.nbytes
        return sum(tables.nbytes for tables in self.tables) + rings + away

    def bytes_for(self, tokens: int) -> int:
        copied = max(t.nbytes for t in self.recent_k)  # where sequences move to other rows
        return self._beside_blocks + copied + super().bytes_for(tokens)

    def start(self, ragged: Ragged, slots: Sequence[int] | None = None) -> DeviceCachePass:
        return DeviceCachePass(self, ragged, slots)

    def select(self, sequences: Sequence[int]) -> None:
        kept = list(sequences)
        if kept == list(range(self.sequences)):
            return
        super().select(kept)
        self.tables = [tables.select(kept) for tables in self.tables]
        index = on_device(torch.tensor(kept), self.store.device)
        for rings in (self.recent_k, self.recent_v):
            for layer, ring in enumerate(rings):
                rings[layer] = ring[index]

    def fork(self, source: int, target: int) -> None:
        super().fork(source, target)
        self.tell_tables(target)

    def adopt(self, slot: int, blocks: Sequence[int]) -> None:
        super().adopt(slot, blocks)
        self.tell_tables(slot)

    def copy_recent(self, source: int, target: int) -> None:
        for ring in (*self.recent_k, *self.recent_v):
            ring[target] = ring[source]

    def unpack(self, slot: int, place: int, tokens: int) -> None:
        first = BLOCK_TOKENS * place
        places = torch.arange(first, first + tokens, device=self.store.device) % self.ring
        for layer, form in enumerate(self.forms):
            number, inner = self.place[layer]
            block = self.groups[number].blocks[slot][place]
            k, v = dequantize_blocks(self.stores[number].read(inner, block), form)
            v = v[..., : form.own_value_dim]
            for ring, x in ((self.recent_k[layer], k), (self.recent_v[layer], v)):
                ring[slot, places] = x[:, :tokens].transpose(0, 1).to(ring.dtype)

    def tell_tables(self, slot: int) -> None:
        """Have the tables know a slot whose blocks are others than passes have made."""
        for tables, group in zip(self.tables, self.groups, strict=True):
            tables.write(slot, 0, [max(block, 0) for block in group.blocks[slot]])


def _growing(
    group: LayerGroup,
    shapes: Sequence[HeadShape],
    forms: Sequence[KVFormat],
    count: int,
    device: torch.device,
) -> DeviceBlocks:
    kv_heads = [shapes[layer].kv_heads for layer in group.layers]
    mine = [forms[layer] for layer in group.layers]
    return DeviceBlocks(mine, BlockPool.growing(DEVICE, mine, kv_heads, count, device))
