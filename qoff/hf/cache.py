"""The KV cache as transformers' `generate` sees it: columns of a padded batch."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import EllipsisType
from typing import Any, Self

import torch
import transformers
from torch import Tensor
from transformers import Cache

from qoff.errors import OpError
from qoff.kernels.layout.heads import HeadShape
from qoff.kernels.layout.states import StateShape
from qoff.kvcache.quant import KVBits, KVQuant, kv_quant
from qoff.models.runtime import Runtime

from .budget import Budget
from .padded_batch import PaddedBatch

# What transformers calls the cache of a forward pass. `GenerationMixin` would tell, and bring
# torch's compiler along.
_VERSION = tuple(map(int, transformers.__version__.split(".")[:2]))
CACHE = "cache" if _VERSION >= (5, 24) else "past_key_values"


class QoffCache(Cache):
    """What a qoff model remembers; pass it as `cache` to read on from there.

    model: from `qoff.load`; others with the same attention can go on with the cache, too.
    batch_size: sequences; an empty cache takes on those of the first batch it meets. kv: as for
    `qoff.load`; by default what the model was loaded with. keeps: all blocks; otherwise layers with
    sliding windows keep what they will read, and `crop` raises ArgumentError for more than 128
    columns where that is not enough.
    `crop` goes back to an earlier column (with linear attention to the first alone: it raises
    ArgumentError for others), and `copy.deepcopy` keeps a state to come back to.
    Raises OpError for another model than qoff's, and ArgumentError and OpError as `qoff.load` does.

    transformers counts columns, padding included; `tokens` holds the tokens alone, so that padding
    costs neither memory nor time.
    """

    is_compileable = False

    def __init__(
        self,
        model: object,
        batch_size: int = 1,
        *,
        kv: KVQuant | KVBits | EllipsisType | None = ...,
        keeps: bool = True,
    ) -> None:
        self.layers = []  # of transformers' own caches; there is one store for all layers here
        runtime = getattr(model, "runtime", None)
        if not isinstance(runtime, Runtime):
            raise OpError(
                f"qoff.QoffCache is for a model of qoff.load, not a {type(model).__name__}"
            )
        if batch_size < 1:
            raise OpError(f"a cache is for at least one sequence, not {batch_size}")
        self.shapes: tuple[object, ...] = runtime.decoder.cache_shapes
        form = runtime.kv if kv is ... else kv_quant(kv)
        if form is not None and keeps:
            form = replace(form, keeps=True)
        self.tokens = runtime.decoder.new_cache(batch_size, kv=form)
        budget = getattr(model, "budget", None)
        self._bounded_by = None if budget is None else weakref.ref(budget)
        self.room = 0  # tokens of each sequence that room was made for
        self.columns = 0
        self._padded: list[tuple[int, Tensor]] = []  # first column, bool [B, T]: is it a token
        if budget is not None and keeps:  # else as soon as it has room
            budget.count(self)

    def __getstate__(self) -> dict[str, Any]:
        """Without the bound of memory, which a copy in another process has no part of."""
        return {**self.__dict__, "_bounded_by": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        found = type(self).__new__(type(self))
        found.__dict__.update(
            {name: copy.deepcopy(x, memo) for name, x in self.__getstate__().items()}
        )
        found._bounded_by = self._bounded_by
        if (budget := self._budget) is not None:
            with budget.rows(found, found.batch_size):
                budget.count(found)
        return found

    @property
    def is_linear(self) -> list[bool]:
        """False for each layer: `generate` hands over only the tokens that are not read yet."""
        return [False] * len(self)

    def __len__(self) -> int:
        return len(self.shapes)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.batch_size} sequences, {self.columns} columns, "
            f"{type(self.tokens).__name__} of {self.nbytes} bytes)"
        )

    @property
    def is_croppable(self) -> bool:
        """Whether it can go back to an earlier column than the first."""
        return not any(isinstance(shape, StateShape) for shape in self.shapes)

    @property
    def nbytes(self) -> int:
        return self.tokens.nbytes

    @property
    def is_initialized(self) -> bool:
        return self.columns > 0

    @property
    def batch_size(self) -> int:
        return self.tokens.sequences

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.columns

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.columns + query_length, 0

    def activate_past_recording(self) -> None:
        """Nothing to do: the past is kept anyway."""

    def update(self, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        raise OpError("a qoff cache is filled by qoff models only, not by transformers' modules")

    def prepare(self, shapes: Sequence[object], batch_size: int) -> None:
        """Raise OpError unless this batch of a model can be read into the cache."""
        if tuple(shapes) != self.shapes:
            raise OpError(
                f"the cache was made for another model, of {_described(self.shapes)}; this one "
                f"has {_described(shapes)}: make a cache for it with qoff.QoffCache(model)"
            )
        if self.columns == 0 and self.batch_size != batch_size:
            self._select([0] * batch_size)
            self.room = 0
        if self.batch_size != batch_size:
            raise OpError(f"the cache holds {self.batch_size} sequences, the batch {batch_size}")

    def make_room(
        self, tokens: int, counts: Sequence[int], rows: int, logits: int | None = None
    ) -> int:
        """Have room for `tokens` tokens of each sequence, within the model's bound of memory.

        counts: new tokens of each; rows: of logits; logits: rows that are there at once, copies
        included, None: what `generate` makes of each. Returns how many of each may be read in one
        pass. Raises BudgetError.
        """
        budget = self._budget
        return max(counts) if budget is None else budget.admit(self, tokens, counts, rows, logits)

    def _select(self, rows: list[int]) -> None:
        budget = self._budget
        with nullcontext() if budget is None else budget.rows(self, len(rows)):
            self.tokens.select(rows)

    @property
    def _budget(self) -> Budget | None:
        """What bounds the model's memory, as long as there is the model."""
        return None if self._bounded_by is None else self._bounded_by()

    def add(self, columns: PaddedBatch) -> None:
        """Count the columns of a batch that has been read."""
        rows, width = columns.shape
        if len(columns.places) != rows * width:
            real = torch.zeros(rows * width, dtype=torch.bool)
            real[columns.places] = True
            self._padded.append((self.columns, real.view(rows, width)))
        self.columns += width

    def reset(self) -> None:
        self.crop(-self.columns)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest columns: -n for n of them, as transformers counts; 0 for none.

        Raises ValueError for a positive number, and ArgumentError for a packed cache where some
        rows have fewer tokens in these columns than others, and older ones; and for a part of the
        columns of a model with linear attention, whose states cannot go back.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes a negative number of tokens, not {tokens_to_remove}")
        left = max(0, self.columns + tokens_to_remove)
        if not left:  # whatever became of the last pass
            self.tokens.forget(max(self.columns, *self.tokens.lengths))
            self._padded, self.columns = [], 0
            return
        counts = torch.full((self.batch_size,), self.columns - left)
        for first, real in self._padded:
            counts -= real[:, max(0, left - first) :].logical_not().sum(1)
        self.tokens.forget_each(counts.tolist())
        self._padded = [(n, real[:, : left - n]) for n, real in self._padded if n < left]
        self.columns = left

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep these rows, in this order; one may be named more than once."""
        rows = beam_idx.tolist()
        self._select(rows)
        self._padded = [(first, real[rows]) for first, real in self._padded]

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows: their numbers, or a bool for each."""
        self.reorder_cache(indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Put so many copies of each row in its place."""
        self.reorder_cache(torch.arange(self.batch_size).repeat_interleave(repeats))


def _described(shapes: Sequence[object]) -> str:
    first = shapes[0]
    if not isinstance(first, HeadShape):
        return f"{len(shapes)} layers of {first}"
    attending = [one for one in shapes if isinstance(one, HeadShape) and not one.indexes]
    first = attending[0]
    return (
        f"{len(attending)} layers with {first.heads} heads and {first.kv_heads} KV heads of size "
        f"{first.head_dim}"
    )
