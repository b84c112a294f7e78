"""The cache of transformers' modules whose attention is qoff's: K and V are in one of qoff's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from qoff.errors import ArgumentError
from qoff.kernels.layout.ragged import Ragged
from qoff.kvcache import KVCache

from .cache import ModuleCache, ModuleCachePass


class PackedLayer(CacheLayerMixin):
    """A layer of transformers' cache that keeps nothing: its attention appends to another one."""

    is_croppable = True

    def __init__(self, is_sliding: bool) -> None:
        super().__init__()
        self.is_sliding = is_sliding
        self.columns = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Count the new columns, and hand them on."""
        self.columns += key_states.shape[-2]
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.columns + query_length, 0

    def get_seq_length(self) -> int:
        return self.columns

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.columns = 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Nothing to do."""

    def crop(self, tokens_to_remove: int) -> None:
        self.columns -= abs(tokens_to_remove)


class PackedModuleCache(ModuleCache):
    """transformers' cache for what is no attention, and `tokens`, the K and V of what is.

    layers: transformers' numbers of the attention layers, in the order of those of `tokens`.
    Otherwise as `ModuleCache`.
    """

    def __init__(self, config: Any, sequences: int, layers: Sequence[int], tokens: KVCache) -> None:
        self._layers = layers
        super().__init__(config, sequences)
        self.tokens = tokens

    @property
    def nbytes(self) -> int:
        return super().nbytes + self.tokens.nbytes

    def bytes_for(self, tokens: int) -> int:
        return super().nbytes + self.tokens.bytes_for(tokens)

    def reserve(self, tokens: int) -> None:
        self.tokens.reserve(tokens)

    def begin(self, ragged: Ragged) -> ModuleCachePass:
        begun = super().begin(ragged)
        begun.tokens = self.tokens.begin(ragged)
        return begun

    def select(self, sequences: Sequence[int]) -> None:
        self.tokens.select(sequences)
        super().select(sequences)

    def forget(self, tokens: int) -> None:
        if any(tokens < length for length in self.lengths) and not self.states.is_croppable:
            raise ArgumentError(
                "this model has recurrent states, which cannot go back to an earlier token; start "
                "with an empty cache"
            )
        self.tokens.forget(tokens)
        super().forget(tokens)

    def _empty(self) -> Any:
        states = super()._empty()
        for index in self._layers:
            states.layers[index] = PackedLayer(bool(states.layers[index].is_sliding))
        return states
