"""What transformers' modules remember of a sequence, as plans count it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
from torch import Tensor

from .configs import DTYPE

# Tokens that layers may sum up to one, and keep until there are as many.
_BLOCKS = tuple(1 << n for n in range(9))
# Tokens of a trial, as some models take milliseconds for each: that is, and half of it, all but one
# of a block of any of these sizes.
_TRIED = 2 * _BLOCKS[-1] - 1
KINDS = ("conv_states", "recurrent_states")


@dataclass(frozen=True)
class LayerMemory:
    """What transformers' cache keeps in a layer for a sequence.

    heads: of K and V that are not packed, [KV heads, D] each, in `dtype`. states: of what sums up
    all tokens, by kind and number, tensors without content.
    """

    heads: tuple[tuple[int, int], ...]
    dtype: torch.dtype
    states: dict[tuple[str, int], Tensor]

    @classmethod
    def of(cls, layer: Any, packed: bool) -> LayerMemory:
        """Of a layer of a `DynamicCache` after a pass of one sequence; packed: K and V are."""
        pair: Any = (getattr(layer, "keys", None), getattr(layer, "values", None))
        kept = () if packed or pair[0] is None else pair
        states = {
            (kind, i): state[0].to("meta")
            for kind in KINDS
            for i, state in getattr(layer, kind, {}).items()
            if state is not None
        }
        heads = tuple((part.shape[1], part.shape[3]) for part in kept)
        return cls(heads, kept[0].dtype if kept else DTYPE, states)

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of a token."""
        return self.dtype.itemsize * sum(heads * dim for heads, dim in self.heads)

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of a sequence."""
        return sum(state.nbytes for state in self.states.values())


@dataclass(frozen=True)
class SequenceMemory:
    """What transformers' cache keeps of a sequence beside packed K and V.

    layers: what each layer does, where that is known; sequences share tensors then, and are padded
    to a batch. own: where it is not, bytes in each layer of a cache of so many tokens; each
    sequence has one then, and is computed alone. reason: why.
    """

    layers: Sequence[LayerMemory] = ()
    own: Callable[[int], Sequence[int]] | None = None
    reason: str = ""

    @property
    def alone(self) -> bool:
        """Whether each sequence has a cache for itself."""
        return self.own is not None

    @property
    def whole_prompts(self) -> bool:
        """Whether prompts are read in one pass: recurrent layers go on by single tokens."""
        return self.alone or any(layer.states for layer in self.layers)

    @property
    def is_empty(self) -> bool:
        """Whether everything is in packed blocks."""
        return not self.alone and not any(layer.heads or layer.states for layer in self.layers)

    @property
    def state_bytes(self) -> int:
        """Of states, which passes copy."""
        return sum(layer.state_bytes for layer in self.layers)

    def nbytes(self, context: int) -> int:
        """Of a sequence of so many tokens."""
        if self.own is not None:
            return sum(self.own(context))
        return context * sum(layer.token_bytes for layer in self.layers) + self.state_bytes

    def attended_bytes(self, context: int, heads: int) -> int:
        """What a pass makes of a layer's K and V: a copy, and one more for every query head."""
        if self.own is not None:
            return (1 + heads) * max(self.own(context))
        each = (
            layer.token_bytes * (1 + max(1, heads // min(kv for kv, _ in layer.heads)))
            for layer in self.layers
            if layer.heads
        )
        return context * max(each, default=0)


def extrapolated(trial: Callable[[int], Sequence[int]], tokens: int) -> list[int]:
    """Bytes of layers, the most of a sequence that grows to so many tokens.

    trial: tells them after a pass of a few tokens. Layers of many grow as those of some do, or
    less, where they have windows.
    """
    if tokens <= _TRIED:
        # The rest of each size of blocks is the most one token before the next one.
        ends = {(tokens + 1) // size * size - 1 for size in _BLOCKS}
        each = [trial(end) for end in {tokens, *ends} if end > 0]
        return [max(of_layer) for of_layer in zip(*each, strict=True)]
    few = _TRIED // 2
    both = zip(trial(few), trial(_TRIED), strict=True)
    return [y + ceil((tokens - _TRIED) * (y - x) / (_TRIED - few)) for x, y in both]


def cache_bytes(states: Any) -> list[int]:
    """Bytes of each layer of transformers' cache, with each tensor in memory of its own."""
    return [sum(x.nbytes for x in _unique(vars(layer))) for layer in states.layers]


def compact(states: Any) -> None:
    """Put each tensor of transformers' cache that is a part of a larger one in its own memory.

    Windows are cut from all tokens of a pass, which would stay.
    """
    for layer in states.layers:
        larger = [x for x in _unique(vars(layer)) if x.untyped_storage().nbytes() > x.nbytes]
        if larger:
            own = {id(x): x.clone(memory_format=torch.contiguous_format) for x in larger}
            vars(layer).update(_replaced(vars(layer), own))


def _unique(values: Any) -> list[Tensor]:
    return list({id(x): x for x in tensors(values)}.values())


def tensors(values: Any) -> Iterator[Tensor]:
    """The tensors in the attributes of a layer of transformers' cache."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (Mapping, list, tuple)):
        for value in values.values() if isinstance(values, Mapping) else values:
            yield from tensors(value)


def _replaced(values: Any, own: Mapping[int, Tensor]) -> Any:
    """With other tensors for those that have these ids."""
    if isinstance(values, Tensor):
        return own.get(id(values), values)
    if isinstance(values, dict):
        return {key: _replaced(value, own) for key, value in values.items()}
    if isinstance(values, (list, tuple)):
        return type(values)(_replaced(value, own) for value in values)
    return values
