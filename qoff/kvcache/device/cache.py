"""The packed KV cache in the memory of a GPU, for the Triton ops."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from qoff.errors import ArgumentError
from qoff.kernels.layout.heads import HeadShape
from qoff.kernels.layout.kv_format import BLOCK_TOKENS, KVFormat
from qoff.kernels.layout.ragged import Ragged
from qoff.kernels.reference.kv_blocks import dequantize_blocks
from qoff.kvcache.slots import SlotCache
from qoff.kvcache.store.base import BlockStore, GrowingBlocks
from qoff.kvcache.store.placement import DEVICE, KVPlacement
from qoff.memory.instrumentation import PLAIN, Instrumentation

from .blocks import DeviceBlocks, offloaded_blocks
from .cache_pass import DeviceCachePass
from .tables import DeviceTables


class DeviceCache(SlotCache):
    """Recent tokens in float16 or bfloat16 rings, older ones packed in blocks.

    shapes, forms: per layer. window: so many of the newest tokens are never packed; a ring has room
    for these and one block more. A block is packed when 64 tokens have left the window, in the pass
    in which they do, whose attention still sees them unpacked. Sequences that were one before
    (`select`) share their blocks. capacity: tokens of each sequence that there is room for at once.
    steady: what kernels are told of the number of blocks changes seldom, so that decoding can be
    recorded and replayed. values_rotated: see `DeviceLayerCache`.

    placement: which blocks stay on the device, of a sequence of `capacity` tokens or as many as
    `reset` says. The others go to `offloaded`, whose blocks the CPU attends to while the GPU
    attends to the rest (default: host memory that grows). store: blocks that this cache shares
    with others, in place of those that the last three arguments speak of. Raises ArgumentError for
    offloaded blocks of a form that the CPU does not attend to, or on disk without a store.
    """

    store: DeviceBlocks

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
        placement: KVPlacement | None = None,
        offloaded: BlockStore | None = None,
        instrumentation: Instrumentation = PLAIN,
        store: DeviceBlocks | None = None,
    ) -> None:
        expected = self.blocks_of(capacity, window, 0)
        super().__init__(sequences, window, expected=expected)
        self.steady = steady
        self.values_rotated = values_rotated
        self.group = max(shape.heads // shape.kv_heads for shape in shapes)
        if store is None:
            placement = placement or KVPlacement()
            kv_heads = [shape.kv_heads for shape in shapes]
            if placement.device_fraction < 1:
                offloaded = offloaded or _host_blocks(forms, kv_heads, placement)
            elif offloaded is not None:
                raise ArgumentError(
                    "all blocks stay on the device; nothing would be in another store"
                )
            count = sequences * placement.capacity(expected)[DEVICE]
            store = DeviceBlocks(
                forms,
                kv_heads,
                device,
                count,
                placement,
                offloaded,
                instrumentation=instrumentation,
            )
        self.store = store
        self.tables = DeviceTables(sequences, device)
        self.ring = window + BLOCK_TOKENS
        rings = [(sequences, self.ring, shape.kv_heads, shape.head_dim) for shape in shapes]
        self.recent_k = [torch.empty(ring, dtype=dtype, device=device) for ring in rings]
        self.recent_v = [torch.empty(ring, dtype=dtype, device=device) for ring in rings]

    @staticmethod
    def recent_bytes(
        shapes: Sequence[HeadShape], sequences: int, window: int, dtype: torch.dtype
    ) -> int:
        """Bytes of the rings of a cache."""
        values = sum(2 * shape.kv_heads * shape.head_dim for shape in shapes)
        return sequences * (window + BLOCK_TOKENS) * values * dtype.itemsize

    @property
    def nbytes(self) -> int:
        rings = sum(t.nbytes for t in (*self.recent_k, *self.recent_v))
        away = 0 if self.store.write_back is None else self.store.write_back.nbytes
        return self.store.nbytes + self.tables.nbytes + rings + away

    def bytes_for(self, tokens: int) -> int:
        copied = max(t.nbytes for t in self.recent_k)  # where sequences move to other rows
        beside = self.nbytes - self.store.nbytes + copied
        return beside + self.store.bytes_for(self._blocks_for(tokens))

    def reserve(self, tokens: int) -> None:
        self.store.reserve(self._blocks_for(tokens))

    def _blocks_for(self, tokens: int) -> int:
        return self.sequences * self.blocks_of(tokens, self.window, 0)

    @property
    def offloaded_tokens(self) -> list[int]:
        """How many tokens of each sequence, its oldest, are not on the device."""
        return [BLOCK_TOKENS * len(offloaded_blocks(blocks)) for blocks in self.blocks]

    def start(self, ragged: Ragged, slots: Sequence[int] | None = None) -> DeviceCachePass:
        return DeviceCachePass(self, ragged, slots)

    def select(self, sequences: Sequence[int]) -> None:
        kept = list(sequences)
        if kept == list(range(self.sequences)):
            return
        super().select(kept)
        self.tables = self.tables.select(kept)
        index = torch.tensor(kept, device=self.store.device)
        for rings in (self.recent_k, self.recent_v):
            for layer, ring in enumerate(rings):
                rings[layer] = ring[index]

    def fork(self, source: int, target: int) -> None:
        super().fork(source, target)
        self._tell_table(target)

    def adopt(self, slot: int, blocks: Sequence[int]) -> None:
        super().adopt(slot, blocks)
        self._tell_table(slot)

    def copy_recent(self, source: int, target: int) -> None:
        for ring in (*self.recent_k, *self.recent_v):
            ring[target] = ring[source]

    def unpack(self, slot: int, block: int, tokens: int) -> None:
        first = BLOCK_TOKENS * self.blocks[slot].index(block)
        places = torch.arange(first, first + tokens, device=self.store.device) % self.ring
        for layer, form in enumerate(self.store.forms):
            k, v = dequantize_blocks(self.store.read(layer, block), form)
            for ring, x in ((self.recent_k[layer], k), (self.recent_v[layer], v)):
                ring[slot, places] = x[:, :tokens].transpose(0, 1).to(ring.dtype)

    def _tell_table(self, slot: int) -> None:
        self.tables.write(slot, 0, [max(block, 0) for block in self.blocks[slot]])


def _host_blocks(
    forms: Sequence[KVFormat], kv_heads: Sequence[int], placement: KVPlacement
) -> BlockStore:
    if placement.device_fraction + placement.host_fraction < 1 - 1e-9:
        raise ArgumentError("blocks on disk need a store that keeps them there")
    return GrowingBlocks(forms, kv_heads)
