"""The KV cache as transformers' `generate` sees it: columns of a padded batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import Cache

from qoff.errors import OpError
from qoff.kvcache import KVCache


class GenerationCache(Cache):
    """A `KVCache` behind the interface of `transformers.Cache`.

    transformers counts columns, padding included; the cache below holds the tokens alone, so that
    padding costs neither memory nor time.
    """

    def __init__(self, tokens: KVCache) -> None:
        # The base class is a list of per-layer caches; this one has a single store for all layers.
        self.layers = []
        self.tokens = tokens
        self.columns = 0

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_croppable(self) -> bool:
        return True

    @property
    def is_initialized(self) -> bool:
        return self.columns > 0

    @property
    def batch_size(self) -> int:
        return self.tokens.sequences

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return how many columns have been read, padding included."""
        return self.columns

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    def activate_past_recording(self) -> None:
        """Nothing to do: the past is kept anyway."""

    def update(self, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        raise OpError("a qoff cache is filled by qoff models only, not by transformers' modules")

    def reset(self) -> None:
        self.crop(-self.columns)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest columns: -n for n of them, as transformers counts."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes a negative number of tokens, not {tokens_to_remove}")
        self.tokens.forget(-tokens_to_remove)
        self.columns = max(0, self.columns + tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.tokens.select(beam_idx.tolist())

    def batch_select_indices(self, indices: Tensor) -> None:
        self.tokens.select(_row_numbers(indices))

    def batch_repeat_interleave(self, repeats: int) -> None:
        rows = torch.arange(self.tokens.sequences).repeat_interleave(repeats)
        self.tokens.select(rows.tolist())


def _row_numbers(indices: Tensor) -> Sequence[int]:
    return (indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices).tolist()
