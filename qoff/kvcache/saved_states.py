"""States that sequences had after whole blocks of their prompts, so that others can go on there."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import islice

import torch

from qoff.kernels.layout.kv_format import BLOCK_TOKENS
from qoff.kernels.layout.states import StateShape, state_bytes

from .states import StateCache


class SavedStates:
    """Recurrent states of `count` beginnings of prompts, those used last, in host memory.

    A beginning is known by its tokens, a number of whole blocks, and the adapter that they were
    read with. shapes: of the layers that have states.
    """

    def __init__(self, shapes: Sequence[StateShape], count: int) -> None:
        self._memory = torch.empty(count, state_bytes(shapes) // 4)
        self._free = list(range(count))
        self._found: OrderedDict[bytes, int] = OrderedDict()  # by digest, those used last behind

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self._memory.nbytes

    def save(self, tokens: Sequence[int], adapter: int, states: StateCache, slot: int) -> None:
        """Keep the states of a sequence that has exactly these tokens. adapter: -1 for none."""
        (*_, digest) = _digests(tokens, adapter)
        place = self._found.pop(digest, None)
        if place is None:
            place = self._free.pop() if self._free else self._found.popitem(last=False)[1]
            states.save(slot, self._memory[place])
        self._found[digest] = place

    def load(
        self, prompt: Sequence[int], adapter: int, most: int, states: StateCache, slot: int
    ) -> int:
        """Give a sequence the states of the longest beginning of its prompt that is kept.

        Of `most` blocks at most. Returns how many these are; 0: none, and nothing is done.
        """
        digests = list(islice(_digests(prompt, adapter), most))
        for count in range(len(digests), 0, -1):
            place = self._found.get(digests[count - 1])
            if place is not None:
                self._found.move_to_end(digests[count - 1])
                states.load(slot, self._memory[place])
                return count
        return 0

    def clear(self) -> None:
        """Forget all of them."""
        self._found.clear()
        self._free = list(range(len(self._memory)))


def _digests(tokens: Sequence[int], adapter: int) -> Iterator[bytes]:
    """Of each beginning of so many whole blocks."""
    found = blake2b(adapter.to_bytes(8, "little", signed=True), digest_size=16)
    for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        found.update(array("q", tokens[start : start + BLOCK_TOKENS]).tobytes())
        yield found.digest()
