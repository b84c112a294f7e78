"""What a model of transformers' modules remembers: its own cache, and which columns are tokens."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from qoff.errors import ArgumentError, OpError
from qoff.kernels.layout.ragged import Ragged
from qoff.kvcache import CachePass, KVCache

from .configs import layer_configs
from .sequence_memory import tensors


class ModuleCache(KVCache):
    """transformers' cache of a padded batch, whatever its layers hold: K and V, or states.

    config: of the model, which says what the layers hold. The first pass adds as many columns as
    its longest sequence has tokens; the others have padding before theirs. There is none later:
    masks of sliding windows, say, count columns. tokens: a cache of qoff's that holds K and V of
    the layers `attention`, by transformers' numbers, instead. itemsize: bytes of a number that
    transformers keeps.
    """

    def __init__(
        self,
        config: Any,
        sequences: int,
        tokens: KVCache | None = None,
        attention: Sequence[int] = (),
        itemsize: int = 4,
    ) -> None:
        self._config, self._attention, self._itemsize = config, attention, itemsize
        self.tokens = tokens
        self.lengths = [0] * sequences
        self._begun = False
        self.real = torch.zeros(sequences, 0, dtype=torch.bool)  # [sequences, columns]
        self.states = self._empty()

    @property
    def nbytes(self) -> int:
        return self._state_bytes + (0 if self.tokens is None else self.tokens.nbytes)

    @property
    def _state_bytes(self) -> int:
        return sum(x.nbytes for layer in self.states.layers for x in tensors(vars(layer)))

    @property
    def columns(self) -> int:
        """Columns that have been read, padding included."""
        return self.real.shape[1]

    @property
    def recurrent(self) -> bool:
        """Whether any layer holds states that sum up the tokens, and not each of them."""
        from transformers.cache_utils import LinearAttentionCacheLayerMixin as States

        return any(isinstance(layer, States) for layer in self.states.layers)

    def bytes_for(self, tokens: int) -> int:
        """With transformers' own K and V an estimate: as the config has them, or what there is."""
        if self.tokens is not None:
            return self._state_bytes + self.tokens.bytes_for(tokens)
        each = self._itemsize * self.sequences * tokens * _kv_width(self._config)
        return max(each * (len(self.states.layers) + 1), self.nbytes)  # a layer grows by a copy

    def reserve(self, tokens: int) -> None:
        if self.tokens is not None:  # transformers' cache grows by what each pass reads
            self.tokens.reserve(tokens)

    def begin(self, ragged: Ragged) -> ModuleCachePass:
        """A pass, if it can be read.

        Raises OpError for one without some of the sequences, one after a pass that failed, one
        after others of a different number of tokens for each sequence, and in models with recurrent
        states of several tokens.
        """
        if self._begun:
            raise OpError("a pass on this cache was not finished; make a new cache")
        if [span.slot for span in ragged.spans] != list(range(self.sequences)):
            raise OpError(
                f"a pass through transformers' modules has all {self.sequences} sequences of its "
                f"cache, in their order, not {[span.slot for span in ragged.spans]}"
            )
        counts = {span.count for span in ragged.spans}
        if self.columns and len(counts) > 1:
            raise OpError(
                "transformers' modules take padding at the beginning only: after the first pass, "
                f"give every sequence as many tokens, not {sorted(counts)}; or use a cache for each"
            )
        if self.columns and self.recurrent and not ragged.is_decode:
            raise OpError(
                "this model has recurrent states: after the first pass it reads one token of each "
                "sequence at a time; give the whole prompt at once, to an empty cache"
            )
        self._begun = True
        tokens = None if self.tokens is None else self.tokens.begin(ragged)
        return ModuleCachePass(self, ragged, tokens)

    def end(self, ragged: Ragged, real: Tensor) -> None:
        """Count the new tokens of a pass; the columns are `real` then."""
        self.real = real
        self.lengthen(ragged)
        self._begun = False

    def select(self, sequences: Sequence[int]) -> None:
        rows = list(sequences)
        if self.tokens is not None:
            self.tokens.select(rows)
        if self.columns:
            self.states.reorder_cache(torch.tensor(rows))
        self.real = self.real[rows]
        self.lengths = [self.lengths[i] for i in rows]

    def forget(self, tokens: int) -> None:
        """Forget the newest `tokens` tokens of each sequence, or all it has.

        Raises ArgumentError where states cannot go back: recurrent ones, and sliding windows that
        have moved on.
        """
        left = self._left(tokens)
        if not self._can_go_back(tokens):
            which = "recurrent states" + (" or windows" if self.tokens is None else "")
            raise ArgumentError(
                f"this model has {which}, which cannot go back to an earlier token; start with an "
                "empty cache"
            )
        if self.tokens is not None:
            self.tokens.forget(tokens)
        if not any(left):
            self.real = self.real[:, :0]
            self.states = self._empty()
            self._begun = False
        elif tokens:
            self.states.crop(-tokens)
            self.real = self.real[:, :-tokens]
        self.lengths = left

    def lose(self) -> None:
        self._begun = True  # and never ended
        if self.tokens is not None:
            self.tokens.lose()

    def can_forget(self, tokens: Sequence[int]) -> bool:
        most = max(tokens)
        possible = self._alike(tokens) and self._can_go_back(most)
        return possible and (self.tokens is None or self.tokens.can_forget([most] * len(tokens)))

    def forget_each(self, tokens: Sequence[int]) -> None:
        """As `forget` of the most; ArgumentError too for others, unless a sequence has fewer."""
        if not self._alike(tokens):
            raise ArgumentError(
                f"a {type(self).__name__} forgets as many tokens of every sequence, "
                f"not {list(tokens)}"
            )
        self.forget(max(tokens))

    def _left(self, tokens: int) -> list[int]:
        return [max(0, length - tokens) for length in self.lengths]

    def _can_go_back(self, tokens: int) -> bool:
        """Whether what transformers holds can go back by so many tokens."""
        return not tokens or not any(self._left(tokens)) or bool(self.states.is_croppable)

    def _alike(self, tokens: Sequence[int]) -> bool:
        """Whether these are as many of each sequence, or all that it has."""
        most, pairs = max(tokens), zip(tokens, self.lengths, strict=True)
        return all(n >= min(most, length) for n, length in pairs)

    def _empty(self) -> Any:
        from transformers import DynamicCache

        states = DynamicCache(config=self._config)
        if self.tokens is not None:
            from .packed_layer import PackedLayer

            for index in self._attention:
                states.layers[index] = PackedLayer(states.is_sliding[index])
        return states


class StatesPass(CachePass):
    """A forward pass of transformers' modules.

    states: their cache. real: bool [B, columns], which are tokens, the new ones included.
    """

    states: Any
    real: Tensor

    @property
    @abstractmethod
    def tokens(self) -> CachePass | None:
        """Where attention of qoff's finds K and V; None: transformers attends."""


class ModuleCachePass(StatesPass):
    """A pass on a `ModuleCache`; tokens: the one on the cache of qoff's in it."""

    tokens: CachePass | None = None

    def __init__(self, cache: ModuleCache, ragged: Ragged, tokens: CachePass | None) -> None:
        self._cache, self.ragged = cache, ragged
        self.tokens, self.states = tokens, cache.states
        self.real = torch.cat([cache.real, new_columns(ragged)], 1)

    def open(self, layer: int) -> NoReturn:
        """Refuse: only transformers' modules read this cache. Raises OpError."""
        raise OpError("a cache of transformers' modules has no layers that qoff's ops could read")

    def end(self) -> None:
        if self.tokens is not None:
            self.tokens.end()
        self._cache.end(self.ragged, self.real)


def new_columns(ragged: Ragged) -> Tensor:
    """The columns of a pass, bool [sequences, longest count]: true where there is a token."""
    return right_aligned([span.count for span in ragged.spans])


def right_aligned(counts: Sequence[int]) -> Tensor:
    """Rows that end together, bool [rows, longest]: true where there is something."""
    width = max(counts)
    return torch.arange(width) >= width - torch.tensor(counts)[:, None]


def _kv_width(config: Any) -> int:
    """Floats of K and V of a token in a layer, the widest, by transformers' names."""
    return max(map(_layer_kv_width, layer_configs(config)))


def _layer_kv_width(config: Any) -> int:
    heads = getattr(config, "num_attention_heads", None) or 1
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    nope, rope, v, plain = (
        getattr(config, f"{which}head_dim", None) or 0
        for which in ("qk_nope_", "qk_rope_", "v_", "")
    )
    dim = plain or config.hidden_size // heads
    return int(kv_heads * (max(nope + rope, dim) + max(v, dim)))
