"""Speculative decoding: tokens that may come next, found in what a sequence has so far.

A pass over proposed tokens costs one sweep of the weights, as one token does, and each token that
is what the model chooses anyway saves a sweep. Prompt lookup: Saxena, github.com/apoorvumang/
prompt-lookup-decoding (2023).
"""

from __future__ import annotations

from collections.abc import Mapping
from weakref import WeakKeyDictionary

import numpy as np

from .request import Sequence

_LONGEST = 4  # newest tokens that are looked for, at most
_SHORTEST = 2  # and at least


class PromptLookup:
    """Proposes what followed the newest tokens where they came before in prompt or answer."""

    def __init__(self) -> None:
        # Room for the whole answer, and how much of it is there.
        self._tokens = WeakKeyDictionary[Sequence, tuple[np.ndarray, int]]()

    def propose(self, wanted: Mapping[int, tuple[Sequence, int]]) -> dict[int, list[int]]:
        """Tokens that may follow, by slot; up to so many of each sequence."""
        return {slot: continued(self._known(one), most) for slot, (one, most) in wanted.items()}

    def _known(self, sequence: Sequence) -> np.ndarray:
        """The tokens of prompt and answer, int32."""
        read, done = len(sequence.prompt), len(sequence.answer)
        tokens, known = self._tokens.get(sequence, (None, 0))
        if tokens is None:
            tokens = np.empty(read + sequence.max_tokens, np.int32)
            tokens[:read] = sequence.prompt
        known = min(known, done)  # it may have begun again
        tokens[read + known : read + done] = sequence.answer[known:]
        self._tokens[sequence] = tokens, done
        return tokens[: read + done]


def continued(tokens: np.ndarray, most: int) -> list[int]:
    """What followed the last tokens, up to `most`, where most of them came before.

    The newest such place from which that many follow, else the oldest. tokens: int32 [n].
    """
    ends = np.flatnonzero(tokens[:-1] == tokens[-1])
    matched = 1
    while matched < _LONGEST and len(ends):
        before = ends[ends >= matched]
        before = before[tokens[before - matched] == tokens[-1 - matched]]
        if not len(before):
            break
        ends, matched = before, matched + 1
    if matched < _SHORTEST or not len(ends):
        return []
    far = ends[ends + most < len(tokens)]
    first = (far[-1] if len(far) else ends[0]) + 1
    return tokens[first : first + most].tolist()
