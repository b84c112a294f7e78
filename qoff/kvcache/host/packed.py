"""A KV cache whose older tokens are 4- or 8-bit blocks of 64, shared where sequences share them."""

from __future__ import annotations

from collections.abc import Sequence

from qoff.errors import ArgumentError
from qoff.kernels.layout.heads import KEYS_PER_VECTOR, HeadShape
from qoff.kernels.layout.kv_format import BLOCK_TOKENS, KVFormat
from qoff.kernels.layout.ragged import Ragged
from qoff.kernels.layout.rotation import rotate_values
from qoff.kernels.reference.kv_blocks import dequantize_blocks
from qoff.kvcache.slots import SlotCache
from qoff.kvcache.store.base import BlockStore, GrowingBlocks

from .packed_pass import PackedPass
from .recent import RecentTokens, RecentWorkspace


class PackedCache(SlotCache):
    """Recent tokens in float32, older ones packed.

    shapes, forms: per layer. window: so many of the newest tokens are never packed, nor are the
    oldest `sinks`, a multiple of 16. A block is packed when 64 tokens have left the window, once
    and for all layers in the same forward pass. Sequences that were one before (`select`) share
    their blocks. attention_top: see `LayerCache.top`. store: where blocks lie, by default memory
    that grows. workspace: for passes of many tokens, shared with other caches. values_rotated: see
    `LayerCache`. Raises ArgumentError for `sinks` with layers that attend to a sliding window.
    """

    store: BlockStore

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
        store: BlockStore | None = None,
        workspace: RecentWorkspace | None = None,
    ) -> None:
        if sinks % KEYS_PER_VECTOR or sinks < 0:
            raise ArgumentError(f"{sinks} sink tokens; use a multiple of {KEYS_PER_VECTOR}")
        if sinks and any(shape.window for shape in shapes):
            raise ArgumentError("a model with a sliding window forgets its sink tokens; use 0")
        super().__init__(sequences, window, sinks)
        self.shapes = tuple(shapes)
        self.attention_top = attention_top
        self.values_rotated = values_rotated
        self.store = store or GrowingBlocks(forms, [shape.kv_heads for shape in shapes])
        self.workspace = workspace or RecentWorkspace()
        self.recent = RecentTokens(self.shapes, sequences, self.recent_tokens(window, sinks))

    @staticmethod
    def recent_tokens(window: int, sinks: int) -> int:
        """Tokens of a sequence that there is float32 room for between passes."""
        return sinks + window + BLOCK_TOKENS

    @property
    def nbytes(self) -> int:
        return self.store.nbytes + self.recent.nbytes

    def bytes_for(self, tokens: int) -> int:
        copied = max(t.nbytes for t in self.recent.keys)  # where sequences move to other rows
        return self.store.bytes_for(self._blocks_for(tokens)) + self.recent.nbytes + copied

    def reserve(self, tokens: int) -> None:
        self.store.reserve(self._blocks_for(tokens))

    def _blocks_for(self, tokens: int) -> int:
        return self.sequences * self.blocks_of(tokens, self.window, self.sinks)

    def start(self, ragged: Ragged, slots: Sequence[int] | None = None) -> PackedPass:
        return PackedPass(self, ragged, slots)

    def select(self, sequences: Sequence[int]) -> None:
        super().select(sequences)
        self.recent.select(list(sequences))

    def copy_recent(self, source: int, target: int) -> None:
        for tensors in (self.recent.keys, self.recent.values):
            for tensor in tensors:
                tensor[target] = tensor[source]

    def unpack(self, slot: int, block: int, tokens: int) -> None:
        for layer, form in enumerate(self.store.forms):
            k, v = dequantize_blocks(self.store.read(layer, block), form)
            if self.values_rotated:
                v = rotate_values(v, back=True)
            self.recent.write(layer, slot, self.sinks, k, v)
