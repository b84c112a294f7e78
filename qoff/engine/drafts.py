"""Speculative decoding: tokens that may come next, found in what a sequence has so far.

A pass over proposed tokens costs one sweep of the weights, as one token does, and each token that
is what the model chooses anyway saves a sweep. Prompt lookup: Saxena, github.com/apoorvumang/
prompt-lookup-decoding (2023).
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import numpy as np

from .request import Sequence

_LONGEST = 4  # newest tokens that are looked for, at most
_SHORTEST = 2  # and at least


class PromptLookup:
    """Proposes what followed the newest tokens where they came before in prompt or answer."""

    def __init__(self) -> None:
        self._tokens = WeakKeyDictionary[Sequence, np.ndarray]()  # room for the whole answer

    def propose(self, sequence: Sequence, most: int) -> list[int]:
        """Up to `most` tokens that may follow; where the answer is given, those that do."""
        done = len(sequence.answer)
        most = min(most, sequence.max_tokens - done - 1)
        if most < 1:
            return []
        if sequence.given:
            return list(sequence.given[done : done + most])
        return continued(self._known(sequence), most)

    def _known(self, sequence: Sequence) -> np.ndarray:
        """The tokens of prompt and answer, int32."""
        read, done = len(sequence.prompt), len(sequence.answer)
        tokens = self._tokens.get(sequence)
        if tokens is None:
            tokens = self._tokens[sequence] = np.empty(read + sequence.max_tokens, np.int32)
            tokens[:read] = sequence.prompt
        tokens[read : read + done] = sequence.answer
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
