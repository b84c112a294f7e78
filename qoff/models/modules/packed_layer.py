"""A layer of transformers' cache whose K and V are in a cache of qoff's."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicLayer


class PackedLayer(DynamicLayer):
    """Counts columns: it keeps K and V without their channels, and its attention appends them."""

    def __init__(self, is_sliding: bool) -> None:
        super().__init__()
        self.is_sliding = is_sliding

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Hand the new columns on."""
        super().update(key_states[..., :0], value_states[..., :0])
        return key_states, value_states

    def get_seq_length(self) -> int:
        return 0 if self.keys is None else self.keys.shape[-2]
