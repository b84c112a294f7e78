"""`generate`'s loop of one token after another, without what transformers does around each pass.

Its meaning is `GenerationMixin._sample`'s. The ids lie in one buffer, a pass is handed to the
runtime as it is, and processors and criteria are called only where their work is not done here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    MinPLogitsWarper,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.streamers import BaseStreamer

from qoff.errors import QoffError
from qoff.kernels.layout.distribution import Choice, Shape
from qoff.kernels.layout.ragged import Ragged
from qoff.kernels.sampling import follows_torch, likeliest, multinomial
from qoff.models.forward_pass import NOT_FINITE, ForwardPass
from qoff.models.runtime import Runtime

from .cache import CACHE, QoffCache

_ARGUMENTS = {"attention_mask", "position_ids", "logits_to_keep", CACHE, "use_cache"}
_TOGETHER = 64  # steps without Python in between, at most
_GROWTH = 256  # columns, where nothing says how many there will be
_WARPERS = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)


class TokenChoice:
    """What `do_sample` and logits processors make of logits.

    The last warpers of a list, in transformers' order, are a `Shape`; `before` are the others.
    shape None: transformers' own operations draw.
    """

    def __init__(self, processors: LogitsProcessorList, do_sample: bool) -> None:
        first = len(processors)
        self.do_sample, self.shape = do_sample, None
        if do_sample and follows_torch():
            order = len(_WARPERS)
            while first and (rank := _rank(processors[first - 1])) < order:
                first, order = first - 1, rank
            self.shape = _shape(processors[first:])
        self.before = LogitsProcessorList(processors[:first])

    def compiled(self, rows: int, ends: Set[int]) -> Choice | None:
        """The same for several steps, without Python; None where only Python can do it."""
        if self.before or (self.do_sample and self.shape is None):
            return None
        return Choice(None if self.shape is None else [self.shape] * rows, tuple(ends))

    def tokens(self, rows: Rows, logits: Tensor) -> list[int]:
        """The next token of each row. logits: float32 [B, V], may change.

        A token is -1 where the model's logits are not finite.
        """
        if not self.before and not self.do_sample:
            return likeliest(logits)
        ids = rows.ids
        scores = logits.to(ids.device)
        if self.before or self.shape is None:
            if not math.isfinite(scores.amax()):  # NaN if one is
                return [-1]
            scores = self.before(ids, scores)  # type: ignore[arg-type]  # typed as LongTensor
        if not self.do_sample:
            return scores.argmax(-1).tolist()
        if self.shape is not None:
            found = multinomial(scores.float().unbind(), self.shape)
            if min(found) >= 0 or not self.before:
                return found  # else torch says what is wrong with the processors' scores
        return torch.multinomial(scores.softmax(-1), 1)[:, 0].tolist()


def _rank(processor: object) -> int:
    """Place in transformers' order; one more than there are for what is no plain warper."""
    plain = getattr(processor, "filter_value", -math.inf) == -math.inf
    plain = plain and getattr(processor, "min_tokens_to_keep", 1) == 1
    kind = type(processor)
    return _WARPERS.index(kind) if kind in _WARPERS and plain else len(_WARPERS)


def _shape(warpers: Sequence[Any]) -> Shape:
    found = Shape()
    for one in warpers:
        for name in Shape._fields:
            if hasattr(one, name):
                found = found._replace(**{name: getattr(one, name)})
    return found


class Ends:
    """When rows end: after a length, with a token, or when other criteria say so."""

    def __init__(self, criteria: StoppingCriteriaList) -> None:
        self.length: float = math.inf
        self.tokens: set[int] = set()
        self.others: list[Any] = []
        # Rows that end go on as padding only where a criterion knows the end token.
        self.pads = any(hasattr(one, "eos_token_id") for one in criteria)
        for one in criteria:
            if type(one) is EosTokenCriteria:
                self.tokens |= set(one.eos_token_id.flatten().tolist())
            elif type(one) is MaxLengthCriteria and not _warns(one):
                self.length = min(self.length, one.max_length)
            else:
                self.others.append(one)

    def ended(self, tokens: Sequence[int], rows: Rows) -> list[bool]:
        """Which rows end with these tokens, their last ones."""
        found = [rows.length >= self.length or token in self.tokens for token in tokens]
        for one in self.others:
            more = torch.as_tensor(one(rows.ids, None)).expand(len(tokens)).tolist()
            found = [a or b for a, b in zip(found, more, strict=True)]
        return found


def _warns(criterion: Any) -> bool:
    """Whether a bound of length is one that transformers warns of on the way."""
    positions = criterion.max_position_embeddings
    return positions is not None and criterion.max_length > positions


@dataclass
class Rows:
    """The ids of a batch so far, in memory that has room for more."""

    _memory: Tensor  # int64 [B, columns]
    length: int

    @classmethod
    def of(cls, ids: Tensor, most: float) -> Rows:
        """Begin with int64 [B, T]; most: columns there will be, infinity where it is not known."""
        length = ids.shape[1]
        rows = cls(ids, length)
        rows._grow(int(most) if most < math.inf else length + _GROWTH)
        return rows

    @property
    def ids(self) -> Tensor:
        """int64 [B, T]."""
        found = self._memory[:, : self.length]
        return found if len(found) == 1 else found.contiguous()

    def append(self, tokens: Tensor) -> None:
        """Some more for each row: int64 [steps, B]."""
        length = self.length + len(tokens)
        if length > self._memory.shape[1]:
            self._grow(2 * length)
        self._memory[:, self.length : length].copy_(tokens.T)
        self.length = length

    def _grow(self, columns: int) -> None:
        memory = torch.empty(len(self._memory), max(columns, self.length), dtype=torch.int64)
        memory[:, : self.length] = self._memory
        self._memory = memory


def is_plain(
    ids: Tensor, config: GenerationConfig, synced_gpus: bool, arguments: dict[str, Any]
) -> bool:
    """Whether `decode` does what `_sample` would. arguments: of a forward pass."""
    return (
        ids.is_cpu
        and not (synced_gpus or config.return_dict_in_generate or config.is_assistant)
        and not (config.output_attentions or config.output_hidden_states)
        and arguments.keys() <= _ARGUMENTS
        and arguments.get("use_cache") is True
        and isinstance(arguments.get(CACHE), QoffCache)
    )


@dataclass(frozen=True)
class Decoding:
    """One call of `generate`. pads: what rows that ended go on with, if anything."""

    runtime: Runtime
    cache: QoffCache
    choice: TokenChoice
    ends: Ends
    pad: int | None
    streamer: BaseStreamer | None

    def run(self, ids: Tensor, logits: Tensor) -> Tensor:
        """From a prompt int64 [B, T] and its logits float32 [B, V] to all ids, int64 [B, L]."""
        rows, open_ = Rows.of(ids, self.ends.length), [True] * len(ids)
        choice = None if self.ends.others else self.choice.compiled(len(ids), self.ends.tokens)
        steps = [self.choice.tokens(rows, logits)]
        while True:
            newest = self._added(steps, rows, open_)
            ended = self.ends.ended(newest[-1].tolist(), rows)  # none with tokens before the last
            open_ = [a and not b for a, b in zip(open_, ended, strict=True)]
            if self.streamer is not None:
                for tokens in newest:
                    self.streamer.put(tokens)
            if not any(open_):
                break
            steps = self._together(newest[-1], rows, choice) if choice and all(open_) else []
            steps = steps or [self.choice.tokens(rows, self._read(newest[-1]))]
        if self.streamer is not None:
            self.streamer.end()
        return rows.ids

    def _added(self, steps: list[list[int]], rows: Rows, open_: Sequence[bool]) -> Tensor:
        """Add the tokens of steps, padding where a row has ended: int64 [steps, B]."""
        if min(steps[-1]) < 0:
            raise QoffError(f"{self.runtime.checkpoint.path}: {NOT_FINITE}")
        found = torch.tensor(steps)
        if self.ends.pads and not all(open_):
            assert self.pad is not None
            found.masked_fill_(~torch.tensor(open_), self.pad)
        rows.append(found)
        return found

    def _together(self, tokens: Tensor, rows: Rows, choice: Choice) -> list[list[int]]:
        """The tokens of several steps, up to one that ends a row; none where Python is needed."""
        if self.cache.tokens.ended is None:
            return []
        most = min(self.ends.length - rows.length, _TOGETHER)
        steps = self.runtime.tokens(self._pass(tokens), choice, int(most))
        self.cache.columns += len(steps)
        return steps

    def _read(self, tokens: Tensor) -> Tensor:
        """Read a token of each row, int64 [B]: logits float32 [B, V]."""
        logits = self.runtime.forward(self._pass(tokens))
        self.cache.columns += 1
        return logits

    def _pass(self, tokens: Tensor) -> ForwardPass:
        """Of a token of each row, int64 [B]."""
        cache, count = self.cache, len(tokens)
        ragged = Ragged.of([1] * count, cache.tokens.lengths)
        if ragged.longest + 1 > cache.room:  # less than this was made room for before
            cache.make_room(ragged.longest + 1, [1] * count, count)
        return ForwardPass(tokens, ragged, cache.tokens, ragged.last_rows)
